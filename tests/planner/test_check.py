from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import layout_pairs

from xmesh.box import Box
from xmesh.errors import PlanError
from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.planner import STRATEGIES, Plan, Transfer, plan
from xmesh.planner.check import check, check_hops, check_order
from xmesh.planner.plans import ListedTransfers
from xmesh.planner.schedulers import BY_NAME
from xmesh.planner.strategy import Hop, hops_of
from xmesh.topology import Topology


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
@pytest.mark.parametrize("scheduler", BY_NAME)
@settings(max_examples=25)
@given(pair=layout_pairs(explicit=True), data=st.data())
def test_what_is_planned_is_sound(strategy, scheduler, pair, data):
    ranks_per_host = data.draw(st.integers(1, 16))
    made = plan(
        pair[0],
        pair[1],
        data.draw(st.sampled_from(("int8", "complex128"))),
        Topology.uniform(16, ranks_per_host, data.draw(st.integers(1, ranks_per_host))),
        strategy=strategy,
        scheduler=scheduler,
        chunk_nbytes=data.draw(st.sampled_from((1, 64, 2**22))),
    )
    check(made)


# --- plans broken on purpose -------------------------------------------------------------------


def sound() -> Plan:
    """Rank 0 keeps rows 0:6 and rank 1 beside it needs them, too; 4 and 5 get 6:12 from rank 2."""
    return plan(
        Layout(DeviceMesh([0, 2]), "S0 R", (12, 4)),
        Layout(DeviceMesh([[0, 1], [4, 5]]), "S0 R", (12, 4)),
        "int8",
        Topology.uniform(6, 2),
        strategy="broadcast",
        chunk_nbytes=8,
    )


def with_transfers(made: Plan, transfers) -> Plan:
    return dataclasses.replace(made, table=ListedTransfers(tuple(transfers)))


def edited(edit: Callable[[list[Transfer]], object]) -> Plan:
    """The plan with its transfers, that inside the host first, changed by ``edit``."""
    transfers = sorted(sound().transfers(), key=lambda transfer: transfer.sender)
    edit(transfers)
    return with_transfers(sound(), transfers)


def refusal(call, *args) -> str:
    with pytest.raises(PlanError) as caught:
        call(*args)
    return str(caught.value)


def change(transfers: list[Transfer], index: int, **fields) -> None:
    transfers[index] = dataclasses.replace(transfers[index], **fields)


def test_the_plan_to_be_broken_is_sound():
    check(sound())
    check(edited(lambda transfers: None))
    transfers = sorted(sound().transfers(), key=lambda transfer: transfer.sender)
    assert [(t.sender, t.receivers, t.volume) for t in transfers] == [
        (0, (1,), 24),
        (2, (4, 5), 24),
    ]
    assert sound().copies(0) == (Box((0, 0), (6, 4)),)


def test_a_dropped_transfer():
    text = refusal(check, edited(lambda transfers: transfers.pop()))
    assert text.startswith("rank 4 must get each element that it needs, once, and no other")
    assert "24 elements of [6:12, 0:4] do not come" in text


def test_a_doubled_transfer():
    def double(transfers):
        transfers.append(dataclasses.replace(transfers[-1], order=(99,)))

    text = refusal(check, edited(double))
    assert text.startswith("rank 4 must get each element that it needs, once, and no other")
    assert "[6:12, 0:4] comes more than once" in text


def test_a_transfer_whose_order_is_taken():
    text = refusal(check, edited(lambda transfers: transfers.append(transfers[-1])))
    assert "transfers must have an order each" in text


@pytest.mark.parametrize(("sender", "holds"), [(0, "[0:6, 0:4]"), (1, "no box"), (3, "no box")])
def test_a_sender_that_does_not_hold_the_box(sender, holds):
    text = refusal(check, edited(lambda transfers: change(transfers, 1, sender=sender)))
    assert text.startswith("a sender must hold what it sends")
    assert f"rank {sender} holds {holds}, not [6:12, 0:4]" in text
    assert f"from rank {sender}" in text


@pytest.mark.parametrize(("receiver", "needs"), [(3, "no box"), (1, "[0:6, 0:4]")])
def test_an_extra_receiver(receiver, needs):
    text = refusal(
        check, edited(lambda transfers: change(transfers, 1, receivers=(4, 5, receiver)))
    )
    assert text.startswith(f"rank {receiver} must get each element that it needs, once, and no")
    assert f"[6:12, 0:4] is not inside one of {needs}" in text


def test_a_receiver_that_holds_the_box():
    made = plan(
        Layout(DeviceMesh([0, 1]), "R", (4,)), Layout(DeviceMesh([1, 2]), "R", (4,)), "int8"
    )
    (transfer,) = made.transfers()
    again = dataclasses.replace(transfer, sender=0, receivers=(2, 1))
    text = refusal(check, with_transfers(made, [again]))
    assert text.startswith("no byte must be sent to a rank that holds it")
    assert "rank 1 holds part of [0:4]" in text


@pytest.mark.parametrize("receivers", [(), (4, 5, 4), (4, 2)])
def test_receivers_that_are_none_doubled_or_the_sender(receivers):
    text = refusal(check, edited(lambda transfers: change(transfers, 1, receivers=receivers)))
    assert text.startswith("a transfer needs receivers, each once, and none of them its sender")
    assert f"receivers {receivers}" in text


@pytest.mark.parametrize("form", ["send_recv", "broadcast", "carrier pigeon"])
def test_a_form_of_another_strategy(form):
    text = refusal(check, edited(lambda transfers: change(transfers, 0, strategy=form)))
    assert text.startswith("transfers of a broadcast plan must be chain or tree")
    assert repr(form) in text


def test_a_box_cut_short():
    shorter = (Box((6, 0), (12, 3)),)
    text = refusal(check, edited(lambda transfers: change(transfers, 1, boxes=shorter)))
    assert "rank 4 must get" in text
    assert "6 elements of [6:12, 0:4] do not come" in text


def test_boxes_that_overlap_in_one_transfer():
    boxes = (Box((6, 0), (12, 3)), Box((6, 2), (12, 4)))
    text = refusal(check, edited(lambda transfers: change(transfers, 1, boxes=boxes)))
    assert text.startswith("chunks must be the boxes, cut")


def test_boxes_that_overlap_between_transfers():
    def halves(transfers):
        change(transfers, 1, boxes=(Box((6, 0), (12, 3)),))
        other = dataclasses.replace(transfers[1], order=(99,), boxes=(Box((6, 2), (12, 4)),))
        transfers.append(other)

    assert "comes more than once" in refusal(check, edited(halves))


def test_a_chunk_that_is_too_large():
    text = refusal(check, edited(lambda transfers: change(transfers, 1, chunk_volume=12)))
    assert text.startswith("a chunk must not be larger than chunk_nbytes")
    assert "chunk 0 has 12 bytes, the limit is 8" in text


def test_chunks_that_are_not_the_boxes():
    made = edited(lambda transfers: None)
    transfer = made.transfers()[0]
    vars(transfer)["chunks"] = transfer.chunks[1:]
    text = refusal(check, made)
    assert text.startswith("chunks must be the boxes, cut")
    assert "do not come" in text


def test_a_copy_of_what_a_rank_does_not_hold():
    # Copies are told by the streams; here those of a source in which rank 5 holds what it needs.
    made = edited(lambda transfers: change(transfers, 1, receivers=(4,)))
    other = Layout(DeviceMesh([0, 5]), "S0 R", (12, 4))
    vars(made)["streams"] = plan(other, made.dst, topology=made.topology).streams
    text = refusal(check, made)
    assert text.startswith("a copy must be of what the rank holds")
    assert "rank 5 holds no box, not [6:12, 0:4]" in text


def test_a_rank_that_sees_other_transfers_than_the_rest():
    class Forgetful(ListedTransfers):
        def of_rank(self, rank: int) -> list[Transfer]:
            return [] if rank == 5 else super().of_rank(rank)

    made = dataclasses.replace(sound(), table=Forgetful(tuple(sound().transfers())))
    text = refusal(check, made)
    assert text.startswith("a rank must see its transfers as all ranks together do")
    assert "rank 5 sees 0 transfers, the plan has 1 for it" in text


# --- hops broken on purpose --------------------------------------------------------------------

HOSTS = Topology([0, 1, 1, 2, 2])


def hops(form: str = "chain", chunks: int = 3) -> tuple[Transfer, dict[int, list[Hop]]]:
    transfer = Transfer((7,), (Box((0,), (chunks,)),), 0, (1, 2, 3, 4), form, 1)
    return transfer, {rank: hops_of(transfer, HOSTS, rank) for rank in transfer.ranks}


@pytest.mark.parametrize("form", ["send_recv", "local_allgather", "global_allgather", "tree"])
def test_hops_as_they_are_are_sound(form):
    transfer, mine = hops(form)
    check_hops(transfer, mine, HOSTS)
    check_order([transfer], [mine])


def test_a_send_that_nobody_receives():
    transfer, mine = hops()
    mine[1].append(Hop("send", 4, 0, 1))
    text = refusal(check_hops, transfer, mine, HOSTS)
    assert "rank 1 sends chunks [(0, 1)], rank 4 receives []" in text
    assert "transfer (7,) from rank 0" in text


def test_sends_in_another_order_than_their_receives():
    transfer, mine = hops()
    mine[0] = [Hop("send", 1, 1, 3), Hop("send", 1, 0, 1)]
    mine[1][:1] = [Hop("recv", 0, 0, 1), Hop("recv", 0, 1, 3)]
    text = refusal(check_hops, transfer, mine, HOSTS)
    assert "sends chunks [(1, 3), (0, 1)], rank 1 receives [(0, 1), (1, 3)]" in text
    assert "sends must meet their own receives" in refusal(check_order, [transfer], [mine])


def test_a_chunk_that_comes_twice_or_not_at_all():
    transfer, mine = hops()
    mine[3].append(Hop("send", 4, 2, 3))
    mine[4].append(Hop("recv", 3, 2, 3))
    assert "rank 4 receives chunk 2 2 times" in refusal(check_hops, transfer, mine, HOSTS)
    mine[3], mine[4] = [*mine[3][:1], Hop("send", 4, 0, 2)], [Hop("recv", 3, 0, 2)]
    assert "rank 4 receives chunk 2 0 times" in refusal(check_hops, transfer, mine, HOSTS)


def test_a_hop_to_a_stranger_to_itself_or_of_no_chunk():
    for hop in (Hop("send", 9, 0, 1), Hop("send", 1, 0, 1), Hop("recv", 0, 3, 4)):
        transfer, mine = hops()
        mine[1].append(hop)
        text = refusal(check_hops, transfer, mine, HOSTS)
        assert "a hop needs a peer and chunks of its transfer" in text


def test_something_sent_to_the_sender():
    transfer, mine = hops()
    mine[4].append(Hop("send", 0, 0, 1))
    mine[0].append(Hop("recv", 4, 0, 1))
    assert "nobody must send to the sender" in refusal(check_hops, transfer, mine, HOSTS)


def test_a_broadcast_that_enters_a_host_twice():
    transfer, mine = hops("send_recv")
    chain = dataclasses.replace(transfer, strategy="chain")
    text = refusal(check_hops, chain, mine, HOSTS)
    assert "a broadcast must bring each chunk into each host once" in text
    assert "chunk 0 enters host1 2 times" in text


def test_a_ring_that_nobody_feeds():
    transfer, mine = hops("global_allgather", chunks=4)
    # Ranks 1 and 2 wait for each other in place of the sender: every receive has its send.
    mine[0] = [hop for hop in mine[0] if hop.peer > 2]
    mine[1] = [Hop("recv", 2, 0, 1), Hop("send", 2, 1, 2), *mine[1][1:]]
    mine[2] = [Hop("recv", 1, 1, 2), Hop("send", 1, 0, 1), *mine[2][1:]]
    text = refusal(check_order, [transfer], [mine])
    assert "a plan must come to an end" in text
    assert "waits for ever" in text


def test_two_transfers_that_two_ranks_see_in_different_orders():
    first, second = hops()[0], dataclasses.replace(hops()[0], order=(8,))
    mine = hops()[1]
    swapped = {**mine, 1: [Hop("recv", 0, 0, 3)], 2: [], 3: [], 4: []}
    only_first = {**swapped, 0: [Hop("send", 1, 0, 3)]}
    check_order([first, second], [only_first, only_first])
    # Rank 1 posts the second transfer's receives only.
    unheard = {**only_first, 1: []}
    text = refusal(check_order, [first, second], [unheard, only_first])
    assert "rank 0 sends chunk 0 to rank 1, which waits for chunk 0 of transfer 1" in text


def test_a_receive_that_is_never_served():
    transfer, mine = hops()
    mine[0] = []
    text = refusal(check_order, [transfer], [mine])
    assert "rank 1 to rank 2: the send of chunk 0 waits for ever, with 2 behind it" in text
