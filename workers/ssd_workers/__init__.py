"""The GPU side: the decoding engine, and the Celery workers that run it."""

import os

# Both are read when torch is first imported, and neither is changed where the user has set it.

# OpenMP's threads wait for each other a few hundred times in a decoding step. They should wait
# awake across the gaps between the products, which are shorter than 0.3 ms (100,000 rounds are a
# millisecond), but not for the 3 ms that GNU's library has as its default: where other programs
# want the same cores, a step would take ten times as long.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")

# Weights in pages of 2 MiB rather than 4 KiB, where the system lets programs ask for them: a step
# reads all of them, and takes an eighth longer when it has to look up an address for every 4 KiB.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
