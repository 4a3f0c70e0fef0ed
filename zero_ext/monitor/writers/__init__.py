"""Where metrics go: files, terminals, TensorBoard, Weights & Biases."""
