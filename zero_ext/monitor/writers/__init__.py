"""Writers of metrics: files, terminals, TensorBoard, Weights & Biases."""
