"""An agent: the model thinks and calls a tool, Python runs it, the model reads what came out.

    python examples/react_agent.py                # the default model
    python examples/react_agent.py path/or/hub-id

ReAct (Yao et al. 2022) as a plain loop. `s.call` lets the model write a call of one of the tools
and nothing else, runs it, and appends what it returns, or what it failed by. Every turn continues
the same branch, so only what is new is computed, however long the conversation.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable
from typing import Literal

import stemma as st

PRICES = {"lamp": 34, "chair": 58, "desk": 175}

EXAMPLES = """\
Question: How much do 4 pens cost?
Thought: I look up the price of a pen.
Action: price({"thing": "pen"})
Observation: 3
Thought: 4 pens at 3 each cost 4 * 3.
Action: calculate({"expression": "4 * 3"})
Observation: 12
Thought: The answer is 12.
Action: answer({"text": "12"})

Question: What is 250 minus 37?
Thought: That is 250 - 37.
Action: calculate({"expression": "250 - 37"})
Observation: 213
Thought: The answer is 213.
Action: answer({"text": "213"})

Question: How much do 17 bags cost?
Thought: I look up the price of a bag.
Action: price({"thing": "bag"})
Observation: 129
Thought: 17 bags at 129 each cost 17 * 129.
Action: calculate({"expression": "17 * 129"})
Observation: 2193
Thought: The answer is 2193.
Action: answer({"text": "2193"})

Question: What is 96 divided by 8?
Thought: That is 96 / 8.
Action: calculate({"expression": "96 / 8"})
Observation: 12
Thought: The answer is 12.
Action: answer({"text": "12"})

Question: How much do 6 cups cost?
Thought: I look up the price of a cup.
Action: price({"thing": "cup"})
Observation: 14
Thought: 6 cups at 14 each cost 6 * 14.
Action: calculate({"expression": "6 * 14"})
Observation: 84
Thought: The answer is 84.
Action: answer({"text": "84"})

Question: What is 1020 plus 35?
Thought: That is 1020 + 35.
Action: calculate({"expression": "1020 + 35"})
Observation: 1055
Thought: The answer is 1055.
Action: answer({"text": "1055"})

"""

QUESTIONS = [
    "How much do 23 lamps cost?",
    "What is 1000 minus 368?",
    "How much do 12 desks cost?",
    "What is 5832 divided by 18?",
]

OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def price(thing: Literal["lamp", "chair", "desk"]) -> int:
    """What a thing costs."""
    return PRICES[thing]


def calculate(expression: str) -> str:
    """The value of numbers joined by + - * / and brackets.

    Never `eval`: the model writes the expression, and a model may write anything.
    """

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise ValueError("only numbers, + - * / and brackets")

    return f"{value(ast.parse(expression.strip(), mode='eval').body):.12g}"


def answer(text: str) -> None:
    """The last call of all."""


@st.function
def agent(s: st.ProgramState, question: str, most_steps: int = 6) -> str | None:
    """The agent's answer; None if it found none in `most_steps` steps."""
    s += EXAMPLES
    s += f"Question: {question}\n"
    for _ in range(most_steps):
        s += "Thought: " + st.gen("thought", max_tokens=32, stop="\n") + "\nAction: "
        call = s.call([price, calculate, answer], max_tokens=48, on_limit="close")
        if call.name == "answer":
            return str(call.arguments["text"])
    return None


def main(model: str | None = None) -> None:
    with st.LocalBackend(model) as backend:
        for question in QUESTIONS:
            state = agent.run(question, backend=backend, temperature=0)
            print(state.text().removeprefix(EXAMPLES))
            usage = state.usage
            print(f"[{usage.computed_tokens} tokens computed, {usage.cached_tokens:,} saved]\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except st.StemmaError as error:
        sys.exit(f"error: {error}")
