"""What the native engine does differently on CUDA: its own kernels, one copy each way, graphs."""
