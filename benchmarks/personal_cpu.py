"""FedReCo with a five-layer network on 50 clients, on a CPU: time per round in the engine, against a loop in PyTorch.

    python benchmarks/personal_cpu.py [--small] [--network grey|colour|both] [--rounds 1] [--repeats 3] [--out FILE]

The same measurement as `personal_gpu.py`, which says what is done; both systems with all cores, the network for grey
images unless another is asked for: a round of the other takes minutes.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for PyTorch

from personal_gpu import main  # noqa: E402

if __name__ == "__main__":
    main(__doc__ or "", networks=("grey",), rounds=1, repeats=3)
