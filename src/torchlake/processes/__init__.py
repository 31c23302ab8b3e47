"""Child processes that cannot be lost, and what crosses between them and their parent.

children        start, listen to, signal and kill a set of them
child           what a child does, from its first line to its last
watchdog        kills what a parent that was killed leaves behind
serialization   functions by cloudpickle, failures as plain text
environment     thread counts, devices and rank variables, set before Python starts
chunk_process   chunks in one child, which is restarted when a chunk kills it
ranks           a group of ranks: the first to fail is the error, and all are asked to stop
remote          what an engine's task finds on its machine, and what it has to know of the driver
output          what ranks print on other machines
hardware        the cores, memory and GPUs of this machine
cpu             the products that its CPU has instructions for
"""
