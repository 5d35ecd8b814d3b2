"""`rlx run` with DeepSpeed's communication set up first, as accelerate does on GPUs: ZeRO-3 cuts weights on loading."""

from __future__ import annotations

import deepspeed

from rlx_plugins.cli import main

if __name__ == "__main__":
    deepspeed.init_distributed(dist_backend="gloo")
    main()
