"""Graphs: launches captured once at start, replayed with one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cuda.bindings import driver

from ginfer.cuda.runtime.driver import TAKEN, call

if TYPE_CHECKING:
    from collections.abc import Callable

    from ginfer.cuda.runtime.stream import Stream

THREAD_LOCAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Graph:
    """What `work` puts on the stream, as one launch. It holds the addresses and scalars of the
    capture; what changes between replays lies in memory that they point to."""

    def __init__(self, stream: Stream, work: Callable[[], None], *, name: str = "graph") -> None:
        self.stream, self.name = stream, name
        TAKEN["graphs"] += 1
        begun = driver.cuStreamBeginCapture(stream.handle, THREAD_LOCAL)
        call(f"begin the capture of {name}", begun)
        stream.capturing = True
        try:
            work()
        except BaseException:
            driver.cuStreamEndCapture(stream.handle)  # broken; the error of `work` says why
            raise
        finally:
            stream.capturing = False
        graph = call(f"capture of {name}", driver.cuStreamEndCapture(stream.handle))
        try:
            self.num_nodes = _num_nodes(graph, name)
            made = driver.cuGraphInstantiate(graph, 0)
            self.handle = call(f"instantiate {name}", made)
        finally:
            call(f"destroy the capture of {name}", driver.cuGraphDestroy(graph))
        call(f"upload {name}", driver.cuGraphUpload(self.handle, stream.handle))

    def replay(self) -> None:
        """Launch the graph on its stream."""
        call(f"launch {self.name}", driver.cuGraphLaunch(self.handle, self.stream.handle))
        self.stream.note(self.name)

    def close(self) -> None:
        """Destroy the graph."""
        call(f"destroy {self.name}", driver.cuGraphExecDestroy(self.handle))


def _num_nodes(graph: object, name: str) -> int:
    _, count = call(f"nodes of {name}", driver.cuGraphGetNodes(graph, 0))
    return int(count)
