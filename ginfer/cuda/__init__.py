"""All device code: numba.cuda kernels, their launchers, and the host side of the device."""
