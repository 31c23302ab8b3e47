"""Child processes that cannot be lost, and what crosses between them and their parent.

children        start, listen to, signal and kill a set of them
child           what a child does, from its first line to its last
watchdog        kills what a parent that was killed leaves behind
serialization   functions by cloudpickle, failures as plain text
environment     thread counts, devices and rank variables, set before Python starts
hardware        the cores, memory and GPUs of this machine
"""
