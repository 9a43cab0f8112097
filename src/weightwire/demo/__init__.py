"""A real disaggregated RL run on one machine, and the proof that patches change nothing about it.

    settings ──▶ trainer process ──versions──▶ store ──versions──▶ rollout processes
                      ▲                                                  │
                      └───────────── rollouts ◀── store ◀── rollouts ────┘
    all of them ──events──▶ run ──▶ table, proofs, report

The run is made twice from the same seeds: once with patches, once with whole files. Which version
generates which batch is settled beforehand, not by who is faster, so both must give the same bits.
"""
