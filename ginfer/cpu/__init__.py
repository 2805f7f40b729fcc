"""CPU image: the blocks of the Backend protocol as Numba kernels on packed weights.

The folder of compiled kernels is fixed here, before Numba is imported.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

from ginfer.env import cache_root

# Modules whose functions kernels of other files inline. Numba notices edits of a kernel's own file
# only, so the folder's name carries their digest.
INLINED = (
    "product.py",
    "scalar.py",
    "simd.py",
    "kv_codec.py",
    "norm.py",
    "rope.py",
    "sampling.py",
    "acceptance.py",
)


def kernel_cache_dir() -> Path:
    """Folder of compiled kernels, made if need be; a fresh temporary one where none can be."""
    digest = hashlib.sha256()
    for name in INLINED:
        digest.update((Path(__file__).parent / name).read_bytes())
    try:
        folder = cache_root() / f"cpu-{digest.hexdigest()[:12]}"
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(folder)
    except (OSError, RuntimeError):  # RuntimeError: no home
        return Path(tempfile.mkdtemp(prefix="ginfer-"))
    return folder


os.environ["NUMBA_CACHE_DIR"] = str(kernel_cache_dir())
if "numba" in sys.modules:
    sys.modules["numba"].config.reload_config()
