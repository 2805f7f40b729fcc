"""Device functions only: inline PTX, warp and block operations, tiles, number formats."""
