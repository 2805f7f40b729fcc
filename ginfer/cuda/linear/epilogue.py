"""What a linear kernel does with its sums."""

from enum import IntEnum


class Epilogue(IntEnum):
    """N rows of W, T tokens. Results of SILU_UP, N / 2 columns, are rows after prefill and the
    tokens of the next linear, in fragment order, after decode."""

    STORE_BF16 = 0  # y [T, N] BF16
    STORE_F32 = 1  # y [T, N] FP32
    ADD_BF16 = 2  # y [T, N] BF16 += sums
    SILU_UP = 3  # y = silu(gate) * up; 16-row tiles of W alternate gate and up


MATRIX = (Epilogue.STORE_BF16, Epilogue.ADD_BF16, Epilogue.SILU_UP)
EPILOGUES = {  # what a model and a drafter do with the sums of a format's matrices
    "Q4G64_F16S": MATRIX,
    "Q4G64_BF16S": MATRIX,
    "W8G32_F16S": (Epilogue.STORE_F32, Epilogue.STORE_BF16),
    "BF16": (*MATRIX, Epilogue.STORE_F32),
}
