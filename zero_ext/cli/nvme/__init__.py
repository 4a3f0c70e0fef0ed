"""``zero-ext bench-nvme``: I/O engine settings measured on a device."""
