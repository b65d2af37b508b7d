"""Inference on half of a program's ranks, while the other half computes something else.

mpiexec -n 4 python examples/half_of_a_world.py
"""

from mpi4py import MPI

from mpiinfer import Engine, SamplingParams

world = MPI.COMM_WORLD
is_model = world.rank % 2 == 0
half = world.Split(color=int(is_model))
if is_model:
    # Any communicator will do. The call is collective over it, and it stays ours: mpiinfer works on a duplicate.
    with Engine.open("smollm2-135m-instruct", comm=half) as engine:
        outputs = engine.generate(["The capital of France is"], SamplingParams(max_tokens=8))
        for output in outputs:  # they arrive on the first rank of `half`
            print(f"ranks {list(range(0, world.size, 2))} say:{output.text!r}", flush=True)
else:
    # Meanwhile: pi by the midpoint rule, summed over the other half.
    steps = 1_000_000
    width = 1 / steps
    mine = sum(4 / (1 + ((i + 0.5) * width) ** 2) for i in range(half.rank, steps, half.size))
    pi = half.allreduce(mine * width)
    if half.rank == 0:
        print(f"ranks {list(range(1, world.size, 2))} say: pi = {pi:.9f}", flush=True)
half.Free()
world.Barrier()
