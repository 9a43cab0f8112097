"""Engines in other processes: what every server with many ranks needs, whatever it is called.

receiver.py       one rank's subscriber, which stages in a thread of its own
failures.py       what went wrong in a rank, as a value that can travel
status.py proof.py server_status.py    what ranks say, and what it amounts to for a server
calls.py          a server's routes, over HTTP
sidecar.py        keeps any number of servers at a run's newest version
"""
