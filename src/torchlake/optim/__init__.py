"""The optimizer step apart from the rows: optimizers and their groups, the learning rate, the precision, seeds.

In: a job's section `train`, a model, a step's number. Out: an optimizer, a learning rate, torch's switches.
Read `optimizers.py` first (the optimizers, and which weights decay); `depth.py` has what is frozen, and how depth
scales the learning rate. All but the optimizer's tensors is a function of the job and the step's number: so a
checkpoint needs no scheduler or generator state, and a resumed run equals an uninterrupted one.
"""
