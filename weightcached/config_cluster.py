"""The table [cluster] of a config file: which node of how many this one is, and where the nodes meet.

nodes = 2, node_rank = 0            every node has the same table but for node_rank
master_addr, master_port            where node 0 listens: needed with more than one node
publisher_port                      where the ranks of publishers meet: needed with more than one node and a publisher
local_ranks = [2, 1, 1]             ranks of a model on each node; left out: the same number on each
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, StrictStr, ValidationInfo, WithJsonSchema
from pydantic import field_validator as validates

from .config_values import shown
from .meeting import host_and_port

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .config import ModelConfig

MAX_NODES = 256  # whose states fit into one datagram
MAX_SECONDS = 86400.0


def _whole(value: object, what: str, first: int, last: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not first <= value <= last:
        raise ValueError(f"{shown(value)} is no {what}; write a number from {first} to {last}")
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.1 <= value <= MAX_SECONDS:
        raise ValueError(f"{shown(value)} is no time; write seconds, from 0.1 to {MAX_SECONDS:.0f}")
    return float(value)


def _rank_numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{shown(value)} is no list; write the number of ranks on each node, such as [4, 2, 2]")
    return tuple(_whole(number, "number of ranks", 1, 65536) for number in value)


def _nodes(value: object) -> int:
    return _whole(value, "number of nodes", 1, MAX_NODES)


def _node_rank(value: object) -> int:
    return _whole(value, "rank of a node", 0, MAX_NODES - 1)


def _port(value: object) -> int:
    return _whole(value, "port", 1, 65535)


_SECONDS_SCHEMA = WithJsonSchema({"type": "number", "exclusiveMinimum": 0})
_RANKS_SCHEMA = WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1})
Seconds = Annotated[float, PlainValidator(_seconds), _SECONDS_SCHEMA]
RankNumbers = Annotated[tuple[int, ...], PlainValidator(_rank_numbers), _RANKS_SCHEMA]
Nodes = Annotated[int, PlainValidator(_nodes), WithJsonSchema({"type": "integer", "minimum": 1})]
NodeRank = Annotated[int, PlainValidator(_node_rank), WithJsonSchema({"type": "integer", "minimum": 0})]
Port = Annotated[int, PlainValidator(_port), WithJsonSchema({"type": "integer", "minimum": 1})]


class ClusterConfig(BaseModel):
    """One service per node, whose models are spread over all nodes.

    `local_ranks`, `master_addr` and the ports are None where they are left out; with more than one node there are
    `master_addr`, without the brackets that an IPv6 address may be written in, and `master_port`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: Nodes = Field(description="How many nodes there are.")
    node_rank: NodeRank = Field(description="Which of them this one is, from 0.")
    local_ranks: RankNumbers | None = Field(
        None, description="How many ranks of a model each node has, in their order; left out: the same number on each."
    )
    engine_port: Port | None = Field(
        None, description="The port that the engine's own ranks meet at, which must be another one than master_port."
    )
    publisher_port: Port | None = Field(
        None,
        description="The port of node 0 where the ranks of a model with a publisher meet; the next such model, by "
        "name, has the next port.",
    )
    master_addr: StrictStr | None = Field(
        None, validate_default=True, description="The address of node 0, as the other nodes reach it."
    )
    master_port: Port | None = Field(
        None, validate_default=True, description="Where node 0 listens, by TCP and UDP: one that nothing else uses."
    )
    ready: Literal["all", "local"] = Field(
        "all",
        description="When this node is ready: when all nodes have their ranks and agree, or when it has its own.",
    )
    timeout: Seconds = Field(600.0, description="Seconds that a start waits for the other nodes.")
    keep_alive: Seconds = Field(
        5.0, description="Seconds between two signs of life; a node of which three are missed is gone."
    )

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self.nodes == 1

    @property
    def meets_at(self) -> str:
        """Address and port of node 0, for people."""
        return host_and_port(self.master_addr, self.master_port)

    def meeting_of(self, model: ModelConfig, models: Iterable[ModelConfig]) -> tuple[str, int] | None:
        """Address and port where the ranks of a model's publisher meet, None where they are all on this node.

        Each of `models` with a publisher has a port of its own: two nodes need not load them in the same order.
        `ValueError` if there is no port for it.
        """
        if self.alone or not model.publisher or self.master_addr is None:
            return None
        if self.publisher_port is None:
            raise ValueError(
                "its publisher has ranks on other nodes; write publisher_port in [cluster], a port of node 0 where "
                "they meet, which must be another one than master_port and those of engines"
            )
        port = self.publisher_port + sorted(item.name for item in models if item.publisher).index(model.name)
        if port > 65535 or port in (self.master_port, self.engine_port):
            problem = "is none" if port > 65535 else "is taken"
            raise ValueError(
                f"its publisher's ranks would meet at port {port}, which {problem}; publisher_port in [cluster] is the "
                "first of as many ports as there are models with a publisher"
            )
        return self.master_addr, port

    def share_of(self, model: ModelConfig) -> range:
        """The ranks of the model that this node has. `ValueError` if it cannot be spread over the nodes."""
        if not self.alone and getattr(model, "on_mismatch", None) == "reload":
            raise ValueError('on_mismatch = "reload" is for one node; with nodes > 1 a model has one slicing')
        return self.share(model.parallel.world)

    def share(self, world: int, node: int | None = None) -> range:
        """The ranks of a model of `world` ranks that a node has, or this one. `ValueError` if that cannot be."""
        counts = self.counts(world)
        node = self.node_rank if node is None else node
        first = sum(counts[:node])
        return range(first, first + counts[node])

    def counts(self, world: int) -> tuple[int, ...]:
        """How many of `world` ranks each node has. `ValueError` if they are not to be shared out."""
        if self.local_ranks is not None:
            if sum(self.local_ranks) != world:
                numbers = ", ".join(map(str, self.local_ranks))
                raise ValueError(f"local_ranks {numbers} in [cluster] are {sum(self.local_ranks)} ranks, not {world}")
            return tuple(self.local_ranks)
        if world % self.nodes:
            raise ValueError(
                f"{world} {'rank' if world == 1 else 'ranks'} cannot be shared equally by {self.nodes} nodes; "
                "write local_ranks in [cluster]"
            )
        return (world // self.nodes,) * self.nodes

    @validates("node_rank")
    @classmethod
    def _among_the_nodes(cls, value: int, info: ValidationInfo) -> int:
        nodes = info.data.get("nodes")
        if nodes is not None and value >= nodes:
            raise ValueError(f"{value} is none of {nodes} nodes; write a number from 0 to {nodes - 1}")
        return value

    @validates("local_ranks")
    @classmethod
    def _one_for_each_node(cls, value: tuple[int, ...] | None, info: ValidationInfo) -> tuple[int, ...] | None:
        nodes = info.data.get("nodes")
        if value is not None and nodes is not None and len(value) != nodes:
            raise ValueError(f"{shown(list(value))} for nodes = {nodes}; write one number for each node")
        return value

    @validates("master_addr")
    @classmethod
    def _needed_by_many(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and value.startswith("[") and value.endswith("]"):
            value = value[1:-1]
        if (value is None and info.data.get("nodes", 1) > 1) or value == "":
            raise ValueError(f'missing; with {info.data.get("nodes")} nodes write the address of node 0, as "10.0.0.1"')
        return value

    @validates("master_port")
    @classmethod
    def _port_needed_by_many(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is None and info.data.get("nodes", 1) > 1:
            raise ValueError(
                f"missing; with {info.data['nodes']} nodes write the port where node 0 listens, the same on every node"
            )
        if value is not None and value == info.data.get("engine_port"):
            raise ValueError(f"{value} is engine_port too; the engine needs one of its own")
        return value
