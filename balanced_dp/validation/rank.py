"""A rank that torchrun starts: times training steps with DistributedDataParallel.

Arguments: the workload, the samples of each rank, the type of the devices, and the file to which
rank 0 writes the median seconds of a step as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..tuning.workloads import find_workload
from .seconds import step_seconds


def main(workload_name: str, num_samples: int, device_type: str, file: Path) -> None:
    """Time the steps of this rank, which wait for those of the others."""
    torch.get_device_module(device_type).set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    workload = find_workload(workload_name)
    module = workload.new_model().to(device_type)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    times = step_seconds(workload, num_samples, {"DistributedDataParallel": model})
    if dist.get_rank() == 0:
        file.write_text(json.dumps(times["DistributedDataParallel"]))
    dist.barrier()
    del model
    gc.collect()  # no model outlives its group
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
