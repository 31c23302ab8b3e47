"""Whether an error says that memory ran out: libraries say so in words of their own."""

WORDS = (
    "out of memory",  # CUDA's allocator, "CUDA error: out of memory", NCCL's "Cuda failure 'out of memory'", MPS, HIP
    "can't allocate memory",  # torch's DefaultCPUAllocator
    "cannot allocate memory",  # the operating system
    "not enough memory",  # the same on Windows
    "unable to allocate",  # numpy
    "failed to cuda malloc",  # NCCL
    "std::bad_alloc",
    "status_alloc_failed",  # cuBLAS, cuSOLVER, cuDNN, cuSPARSE
    "cublas_status_not_initialized",  # what cublasCreate says when there is no room for its workspace
)


def ran_out(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that the memory of a machine or a device ran out."""
    seen: BaseException | None = error
    while seen is not None:
        words = str(seen).lower()
        if isinstance(seen, MemoryError) or type(seen).__name__ == "OutOfMemoryError" or any(w in words for w in WORDS):
            return True
        seen = seen.__cause__
    return False
