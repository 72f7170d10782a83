"""Dense kernels on one box after another, and the operator that runs them."""
