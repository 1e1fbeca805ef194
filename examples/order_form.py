"""Grammar pieces: a form that the model fills in, and each of its fields a variable.

    python examples/order_form.py                # the default model
    python examples/order_form.py path/or/hub-id

One `gen` writes a whole form. What is the same in all forms is not drawn but computed at once; what
varies is captured: a list where it repeats, None where it is left out, an int where it is a number.
A small model, too, gets the form right every time. What it writes into it is another matter: see
how the last customer pays.
"""

from __future__ import annotations

import sys

import stemma as st

EXAMPLES = """\
Message: Hi, this is Tom. Please send me three lamps and a chair, as soon as you can. I pay cash.
Name: Tom
Items: 3 lamps, 1 chair
Payment: cash

Message: I am Eve and I need a bed.
Name: Eve
Items: 1 bed

Message: Two desks, please, for Jack. Here is my card.
Name: Jack
Items: 2 desks
Payment: card
"""

MESSAGES = [
    "Hello, Maria here. I would like to have two tables. I can pay by card.",
    "Good morning! I need four chairs, one desk and two lamps, please. My name is Ben. Cash is "
    "fine.",
    "Could you send one sofa to me? The name is Alice.",
]

ITEM = st.seq(
    st.capture("count", st.Constraint.of_type(int)),
    " ",
    st.capture("item", st.Constraint.regex("[a-z]+")),
)
FORM = st.seq(
    "Name: ",
    st.capture("name", st.Constraint.regex("[A-Z][a-z]+")),
    "\nItems: ",
    ITEM,
    st.repeat(st.seq(", ", ITEM), at_most=9),
    "\n",
    st.optional(
        st.seq("Payment: ", st.capture("payment", st.Constraint.choices(["cash", "card"])), "\n")
    ),
)


@st.function
def read_order(s: st.ProgramState, message: str) -> list[tuple[int, str]]:
    """What is ordered: how many of what."""
    s += f"{EXAMPLES}\nMessage: {message}\n" + st.gen("form", grammar=FORM, temperature=0)
    return list(zip(s["count"], s["item"], strict=True))


def main(model: str | None = None) -> None:
    with st.LocalBackend(model) as backend:
        items = [{"message": message} for message in MESSAGES]
        for message, state in zip(
            MESSAGES, read_order.run_batch(items, backend=backend), strict=True
        ):
            print(message)
            ordered = ", ".join(f"{count} x {item}" for count, item in state.value)
            print(f"  {state['name']}: {ordered}; pays by {state['payment'] or '?'}")
        stats = backend.stats()
    print(f"\ntokens: {stats.output_tokens} written, {stats.forced_tokens} of them not drawn")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except st.StemmaError as error:
        sys.exit(f"error: {error}")
