"""Python face of asynchronous I/O, stores, optimizer state in stores, and host memory."""
