"""An agent: the model thinks and picks a tool, Python runs it, the model reads what came out.

    python examples/react_agent.py                # the default model
    python examples/react_agent.py path/or/hub-id

ReAct (Yao et al. 2022) as a plain loop. `select` makes the action one of the tools that exist; what
Python appends between two `gen`s is text like any other. Every turn continues the same branch, so
only what is new is computed, however long the conversation.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable

import stemma as st

PRICES = {"lamp": 34, "chair": 58, "desk": 175}

EXAMPLES = """\
Question: How much do 4 pens cost?
Thought: I need the price of a pen.
Action: price pen
Observation: 3
Thought: 4 pens cost 4 times 3.
Action: calculate 4 * 3
Observation: 12
Thought: That is the answer.
Action: answer 12

Question: What is 20 plus 35?
Thought: I add 20 and 35.
Action: calculate 20 + 35
Observation: 55
Thought: That is the answer.
Action: answer 55

Question: What do 17 bags cost?
Thought: I need the price of a bag.
Action: price bag
Observation: 29
Thought: 17 bags cost 17 times 29.
Action: calculate 17 * 29
Observation: 493
Thought: That is the answer.
Action: answer 493

Question: What is 250 minus 37?
Thought: I subtract 37 from 250.
Action: calculate 250 - 37
Observation: 213
Thought: That is the answer.
Action: answer 213

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


def calculate(expression: str) -> str:
    """The value of numbers joined by + - * / and brackets, or what is wrong with the expression.

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

    try:
        return f"{value(ast.parse(expression.strip(), mode='eval').body):.12g}"
    except (SyntaxError, ValueError, ArithmeticError) as error:
        return f"error: {error}"
    except (RecursionError, MemoryError):
        return "error: nested too deeply"


def price(thing: str) -> str:
    """What a thing costs."""
    return str(PRICES.get(thing, "unknown"))


TOOLS = {"calculate": calculate, "price": price}


@st.function
def agent(s: st.ProgramState, question: str, most_steps: int = 6) -> str | None:
    """The agent's answer; None if it found none in `most_steps` steps."""
    s += EXAMPLES
    s += f"Question: {question}\n"
    for _ in range(most_steps):
        s += "Thought: " + st.gen("thought", max_tokens=32, stop="\n") + "\n"
        s += "Action: " + st.select("action", [*TOOLS, "answer"])
        s += " " + st.gen("input", max_tokens=24, stop="\n") + "\n"
        action: str = s["action"]
        argument: str = s["input"]
        if action == "answer":
            return argument
        s += f"Observation: {TOOLS[action](argument)}\n"
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
