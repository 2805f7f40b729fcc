"""The DFlash2 drafter on the GPU: its context, its block, candidates and the path through them."""
