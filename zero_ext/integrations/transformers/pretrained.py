def from_pretrained():
    raise NotImplementedError
