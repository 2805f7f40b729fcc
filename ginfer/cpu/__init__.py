"""CPU image: the blocks of the Backend protocol as Numba kernels on packed weights.

The folder of compiled kernels is fixed here, before Numba is imported.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from ginfer.env import CACHE_DIR

# Modules whose functions kernels of other files inline. Numba notices edits of a kernel's own file
# only, so the folder's name carries their digest.
INLINED = ("product.py", "scalar.py", "simd.py", "kv_codec.py", "norm.py", "rope.py")


def kernel_cache_dir() -> Path:
    """Folder of compiled kernels: $GINFER_CACHE_DIR or the user's cache folder, then a digest."""
    configured = CACHE_DIR.read()
    if configured:
        root = Path(configured)
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches" / "ginfer"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ginfer"
    digest = hashlib.sha256()
    for name in INLINED:
        digest.update((Path(__file__).parent / name).read_bytes())
    return root / f"cpu-{digest.hexdigest()[:12]}"


os.environ["NUMBA_CACHE_DIR"] = str(kernel_cache_dir())
# Threads that spin at the end of a parallel region cost a scheduler slice per region as soon as
# another process wants their core; sleeping costs 5 us. Read when OpenMP is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "numba" in sys.modules:
    sys.modules["numba"].config.reload_config()
