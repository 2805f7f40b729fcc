"""Host side of the device: images, launches, memory, graphs, plans."""
