"""How a contribution travels: Horovod (Gloo, NCCL), torch.distributed (Gloo, NCCL), virtual, single."""
