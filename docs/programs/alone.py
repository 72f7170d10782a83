"""Load an AOTInductor package without this library and run it."""

import sys

import torch

try:
    package = torch._inductor.aoti_load_package(sys.argv[1])
    print(package(torch.zeros(3, 29, dtype=torch.int64)).shape)
except RuntimeError as error:
    print(str(error).partition(" Consider")[0])
