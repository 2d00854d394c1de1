"""One thread a test process: on a shared machine, torch's spinning threads cost far more than they bring."""

import torch

torch.set_num_threads(1)
