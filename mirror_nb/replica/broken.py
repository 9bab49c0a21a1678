"""A GPU that does nothing more for this process: after an assert in one of its kernels, or a wrong address.

Knows CUDA's word for it. Knows no replica and no channel.
"""

from __future__ import annotations

import torch


def is_lost(device: torch.device) -> bool:
    """Whether the process can use its GPU no more; it never waits for what the GPU has to do."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    try:
        # While it records a graph, CUDA answers no questions.
        if not torch.cuda.is_current_stream_capturing():
            # Not `synchronize`: a collective that was begun may wait for replicas that wait for this one's answer.
            torch.cuda.current_stream(device).query()
    except RuntimeError:
        return True
    return False
