"""FlexAttention as a backend: the one guarded call, what a layout costs, and the mixture by it."""
