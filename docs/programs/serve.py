"""Load a program of torch.export and run it."""

import torch

import flexdilated.export  # noqa: F401

model = torch.export.load("model.pt2").module()
print(model(torch.zeros(1, 101, dtype=torch.int64)).shape)
