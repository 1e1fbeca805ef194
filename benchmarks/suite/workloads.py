"""The workloads: programs as users write them, and items to run them on, made from a seed.

The shapes are those of the SGLang paper (Zheng et al. 2024, arXiv 2312.07104, section 6.1). Used by
`measure.py`, which has the programs run without stops, so that the work is the same for all. A
program returns the seconds to the first token that it wants measured, else None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import stemma as st
from suite.text import Writer

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """How large the workloads are: shares of the full counts and lengths."""

    count: float = 1.0
    length: float = 1.0

    def many(self, full: int) -> int:
        """So many items, at least two."""
        return max(2, round(full * self.count))

    def tokens(self, full: int) -> int:
        """So many tokens, at least four."""
        return max(4, round(full * self.length))


FULL = Size()
QUICK = Size(count=0.5, length=0.4)


@dataclass(frozen=True, slots=True)
class Workload:
    """A program, and the items that it runs on at once."""

    name: str
    program: st.Program
    items: list[Item]


# -- few-shot select


@st.function
def multiple_choice(s: st.ProgramState, shots: str, question: str, choices: list[str]) -> None:
    s += shots + question + st.select("answer", choices)


def mmlu(size: Size) -> Workload:
    """MMLU: 5 solved questions of about 110 tokens, then a question, answered by a letter."""
    write = Writer(1)

    def question() -> str:
        asked = write.text(size.tokens(60))
        options = [f"{letter}. {write.words(8)}" for letter in "ABCD"]
        return "\n".join(["Question: " + asked, *options, "Answer:"])

    shots = "".join(f"{question()} {write.random.choice('ABCD')}\n\n" for _ in range(5))
    letters = [" A", " B", " C", " D"]
    items = [
        {"shots": shots, "question": question(), "choices": letters} for _ in range(size.many(12))
    ]
    return Workload("few-shot, MMLU", multiple_choice, items)


def hellaswag(size: Size) -> Workload:
    """HellaSwag: 20 solved stories of about 70 tokens, then a story, and four ways to go on."""
    write = Writer(2)
    shots = "".join(f"Story: {write.text(size.tokens(66))}\n\n" for _ in range(20))
    items = [
        {
            "shots": shots,
            "question": "Story: " + write.text(size.tokens(44)),
            "choices": [" " + write.text(size.tokens(22)) for _ in range(4)],
        }
        for _ in range(size.many(5))
    ]
    return Workload("few-shot, HellaSwag", multiple_choice, items)


# -- agents


@st.function
def react_agent(s: st.ProgramState, tools: str, task: str, results: list[str], new: int) -> None:
    s += tools + f"Task: {task}\n"
    for step, result in enumerate(results, 1):
        s += f"Thought {step}:" + st.gen("thought", max_tokens=new)
        s += f"\nAction {step}:" + st.select("action", [" search", " read", " count"])
        s += f"\nResult {step}: {result}\n"
    s += "Answer:" + st.gen("answer", max_tokens=new)


def react(size: Size) -> Workload:
    """ReAct agents: instructions and examples of 500 tokens, then 3 steps with results of 60."""
    write = Writer(3)
    tools = write.text(size.tokens(500)) + "\n\n"
    items = [
        {
            "tools": tools,
            "task": write.text(size.tokens(30)),
            "results": [write.text(size.tokens(60)) for _ in range(3)],
            "new": size.tokens(24),
        }
        for _ in range(size.many(4))
    ]
    return Workload("ReAct agents", react_agent, items)


@st.function
def villager(s: st.ProgramState, world: str, person: str, events: list[str], new: int) -> None:
    s += f"{world}\n\nYou are {person}\n"
    for event in events:
        s += f"{event}\nIs it important?" + st.select("matters", [" yes", " no"])
        s += "\nYou think:" + st.gen("thought", max_tokens=new)
        s += "\nYou say:" + st.gen("speech", max_tokens=new) + "\n"


def generative_agents(size: Size) -> Workload:
    """Generative agents: one world of 400 tokens, many people, and what happens to each of them."""
    write = Writer(4)
    world = write.text(size.tokens(400))
    items = [
        {
            "world": world,
            "person": write.text(size.tokens(60)),
            "events": [write.text(size.tokens(30)) for _ in range(2)],
            "new": size.tokens(24),
        }
        for _ in range(size.many(8))
    ]
    return Workload("generative agents", villager, items)


# -- trees of branches


@st.function
def tree_of_thought(s: st.ProgramState, problem: str, depth: int, width: int, new: int) -> None:
    """Proposes, grades the proposals side by side, and goes on from the best."""
    s += f"Problem: {problem}\n"
    for level in range(1, depth + 1):
        branches = s.fork(width)
        branches += f"Step {level}:" + st.gen("step", max_tokens=new)
        branches += "\nThis step is" + st.select("grade", [" right", " wrong"])
        chances = [branch.meta("grade").probabilities[" right"] for branch in branches]
        s = branches[chances.index(max(chances))]
        s += ".\n"
    s += "Solution:" + st.gen("solution", max_tokens=new)


def thought_trees(size: Size) -> Workload:
    """Tree of thought: a problem of 300 tokens, 3 levels of 4 proposals."""
    write = Writer(5)
    items = [
        {"problem": write.text(size.tokens(300)), "depth": 3, "width": 4, "new": size.tokens(32)}
        for _ in range(size.many(2))
    ]
    return Workload("tree of thought", tree_of_thought, items)


@st.function
def skeleton_of_thought(s: st.ProgramState, question: str, points: int, new: int) -> None:
    """Writes an outline, then all of its points at once, and puts them together."""
    s += st.user(question)
    s += st.assistant("Outline:" + st.gen("outline", max_tokens=new))
    branches = s.fork(points)
    for i, branch in enumerate(branches, 1):
        branch += st.user(f"Write point {i} of the outline in full.")
        branch += st.assistant(st.gen("point", max_tokens=2 * new))
    s += st.user("Put the points together.\n" + "\n".join(branches["point"]))
    s += st.assistant(st.gen("text", max_tokens=new))


def skeletons(size: Size) -> Workload:
    """Skeleton of thought: a question of 250 tokens, 6 points of 64 tokens each."""
    write = Writer(6)
    items = [
        {"question": write.text(size.tokens(250)), "points": 6, "new": size.tokens(32)}
        for _ in range(size.many(3))
    ]
    return Workload("skeleton of thought", skeleton_of_thought, items)


@st.function
def judge(s: st.ProgramState, essay: str, dimensions: list[str], new: int) -> None:
    """Branch, solve, merge (Saha et al. 2023)."""
    s += st.user(f"Read this essay.\n\n{essay}") + st.assistant("I have read it.")
    branches = s.fork(dimensions)
    for dimension, branch in zip(dimensions, branches, strict=True):
        branch += st.user(f"Judge its {dimension}.") + st.assistant(st.gen("view", max_tokens=new))
    s += st.user("Give a verdict on this.\n" + "\n".join(branches["view"]))
    s += st.assistant("It is" + st.select("verdict", [" excellent", " good", " fair", " poor"]))


def judges(size: Size) -> Workload:
    """LLM judge: essays of 400 tokens, 5 views of 32 tokens each, a verdict."""
    write = Writer(7)
    dimensions = ["clarity", "style", "evidence", "order", "length"]
    items = [
        {"essay": write.text(size.tokens(400)), "dimensions": dimensions, "new": size.tokens(32)}
        for _ in range(size.many(4))
    ]
    return Workload("LLM judge", judge, items)


# -- conversations


@st.function
def chat(s: st.ProgramState, about: str, questions: list[str], new: int) -> list[float]:
    s += st.system(about)
    first_token_s = []
    for question in questions:
        s += st.user(question) + st.assistant(st.gen("answer", max_tokens=new))
        first_token_s.append(s.meta("answer").usage.ttft_s)
    return first_token_s[1:]


def chats(size: Size, seed: int, chats: int, about: int, question: int, new: int) -> list[Item]:
    """Conversations of 4 turns, each about something else."""
    write = Writer(seed)
    return [
        {
            "about": write.text(size.tokens(about)),
            "questions": [write.text(size.tokens(question)) for _ in range(4)],
            "new": size.tokens(new),
        }
        for _ in range(size.many(chats))
    ]


def short_chats(size: Size) -> Workload:
    """Multi-turn chat with long questions (about 200 tokens) and short answers (8)."""
    items = chats(size, 8, chats=4, about=20, question=200, new=8)
    return Workload("chat, short answers", chat, items)


def long_chats(size: Size) -> Workload:
    """Multi-turn chat with questions of 64 tokens and answers of 96."""
    items = chats(size, 9, chats=4, about=20, question=64, new=96)
    return Workload("chat, long answers", chat, items)


def busy_chats(size: Size) -> Workload:
    """Eight chats at once, each behind 400 tokens of its own: how long a later turn waits for its
    first token.
    """
    items = chats(size, 10, chats=8, about=400, question=40, new=24)
    return Workload("8 chats at once", chat, items)


# -- the rest


@st.function
def rag(s: st.ProgramState, task: str, passages: list[str], question: str, new: int) -> None:
    """Answers from passages, then checks the answer against them."""
    s += task + "".join(f"\n\nPassage: {passage}" for passage in passages)
    s += f"\n\nQuestion: {question}\nAnswer:" + st.gen("answer", max_tokens=new)
    s += "\nThe passages say so:" + st.select("supported", [" yes", " no"])


def rag_pipeline(size: Size) -> Workload:
    """RAG: instructions and demonstrations of 200 tokens, 3 of 6 passages of 150, the more popular
    ones first.
    """
    write = Writer(11)
    task = write.text(size.tokens(200))
    library = [write.text(size.tokens(150)) for _ in range(6)]
    items = []
    for _ in range(size.many(8)):
        found = sorted(write.random.sample(range(6), 3))
        items.append(
            {
                "task": task,
                "passages": [library[i] for i in found],
                "question": write.text(size.tokens(20)),
                "new": size.tokens(32),
            }
        )
    return Workload("RAG pipeline", rag, items)


@st.function
def samples(s: st.ProgramState, prompt: str, count: int, new: int) -> None:
    s += prompt + "\nAnswer:" + st.gen("answer", n=count, max_tokens=new)


def self_consistency(size: Size, new: int) -> Workload:
    """Self-consistency: 32 samples of one prompt of about 1,000 tokens."""
    prompt = Writer(12).text(size.tokens(996))
    items = [{"prompt": prompt, "count": size.many(32), "new": size.tokens(new)}]
    return Workload(f"self-consistency, {new} tokens", samples, items)


def no_sharing(size: Size) -> Workload:
    """The control: prompts of 300 tokens that have nothing in common, 32 tokens each."""
    write = Writer(13)
    items = [
        {"prompt": write.text(size.tokens(300)), "count": 1, "new": size.tokens(32)}
        for _ in range(size.many(8))
    ]
    return Workload("no sharing", samples, items)


WORKLOADS: dict[str, Callable[[Size], Workload]] = {
    "mmlu": mmlu,
    "hellaswag": hellaswag,
    "react": react,
    "generative-agents": generative_agents,
    "tree-of-thought": thought_trees,
    "skeleton-of-thought": skeletons,
    "judge": judges,
    "chat-short": short_chats,
    "chat-long": long_chats,
    "rag": rag_pipeline,
    "self-consistency-32": lambda size: self_consistency(size, 32),
    "self-consistency-128": lambda size: self_consistency(size, 128),
    "no-sharing": no_sharing,
    "busy-chats": busy_chats,
}
"""By the name that the command line takes."""
