"""Requests and answers of a side of `python -m experiments.peers`: a line of JSON each.

Only the standard library: every peer's environment imports it from beside its script.
"""

import json
import re
import resource
import sys
from pathlib import Path


def peak():
    """Most memory that this process had, in kB; what `resource` says begins with the parent's."""
    status = Path("/proc/self/status")
    line = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.exists() else None
    return int(line[1]) if line else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def serve(name, answer, base_kb, out=None):
    """Says that it is ready, then answers requests until there are no more. `answer` makes tokens, seconds and passes
    of the target of a request (ids, new, temperature, seed, slots, mode); `base_kb` is peak memory before models were
    loaded; answers go to `out`, standard output unless given."""
    out = sys.stdout if out is None else out
    print(json.dumps({"ready": name}), file=out, flush=True)
    for line in sys.stdin:
        figures = answer(json.loads(line))
        print(json.dumps(figures | {"peak_kb": peak(), "base_kb": base_kb}), file=out, flush=True)
