"""What the native engine does differently on CUDA: kernels, packed copies, decode steps as graphs."""
