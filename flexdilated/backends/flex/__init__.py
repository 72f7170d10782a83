"""FlexAttention as an engine: the one guarded call, what a layout costs, and the mixture by it."""
