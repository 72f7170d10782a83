"""Score and mask functions, and exported programs: operations of torch, differentiated one by one."""
