"""What compiled code, counted bytes and simulated ranks say of kernels, without a run on their device."""
