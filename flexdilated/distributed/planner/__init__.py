"""What ranks exchange and compute, in integers: nothing here touches a tensor."""
