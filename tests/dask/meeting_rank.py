"""One rank that meets the others once per line of its standard input: by a relay, or at the server its environment names."""

from __future__ import annotations

import json
import os
import sys
import time

import horovod.torch as hvd
import torch

from slackring.dask.relay import Relay


def main() -> None:
    where = json.loads(sys.stdin.readline())
    relay = None
    if where is not None:
        relay = Relay(where["host"], where["port"], bytes.fromhex(where["secret"]))
        os.environ.update(relay.environment())
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        if relay is not None:
            relay.generation = json.loads(line)
        begin = time.monotonic()
        pair = hvd.ProcessSet([0, 2])  # meets in a scope whose size the rendezvous is not told
        hvd.init(process_sets=[pair])
        seconds = time.monotonic() - begin
        mine = torch.tensor([float(hvd.rank() + 1)])
        totals = [hvd.allreduce(mine, op=hvd.Sum).item()]
        if pair.included():
            totals.append(hvd.allreduce(mine, op=hvd.Sum, process_set=pair).item())
        hvd.barrier()  # whoever leaves first takes the set down with it
        hvd.shutdown()
        print(json.dumps([totals, seconds]), flush=True)
    if relay is not None:
        relay.stop()


if __name__ == "__main__":
    main()
