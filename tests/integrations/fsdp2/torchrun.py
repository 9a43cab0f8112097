"""torchrun, as a script: python torchrun.py --nproc-per-node 2 example.py"""

from torch.distributed.run import main

if __name__ == "__main__":
    main()
