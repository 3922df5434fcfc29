"""How a contribution travels: Horovod (Gloo, NCCL), virtual, single."""
