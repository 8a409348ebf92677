"""
Samples of several turns, with tools.
Code: onecurve/agents/. Manual: docs/agents.md.
"""

from configurator import choice, positive, untouched

# 'my_file.py:my_function' (onecurve/agents/chat.py says how to write one), or a command such as 'python my_agent.py'
# (onecurve/agents/endpoint.py); '': no agent: one turn, scored by `reward`
agent = ""
max_turns = 8  # turns of a dialogue
agent_timeout = 600.0  # seconds without progress after which an episode counts as hanging
tool_call_parser = ""  # SGLang's name for the format of tool calls; '': qwen25, or llama3 for a llama
credit = "sample"  # each token gets its sample's advantage; 'turn': its turn's, later turns discounted by gamma


def rules(c):
    yield from positive(c, "max_turns agent_timeout")
    yield from choice(c, "credit", "sample turn")
    if not c.agent:
        yield from untouched(c, "credit", "is for --agent")
    if c.advantage not in ("grpo", "dr_grpo", "rloo", "gae"):
        yield from untouched(c, "credit", "is for --advantage=grpo, dr_grpo, rloo or gae")
    if c.agent:
        yield from untouched(c, "chat_template segment_tokens", "is not for --agent")
    if c.credit == "turn":
        yield from untouched(c, "kl_in_reward overlong_cache", "is not for --credit=turn")
    if c.mode in ("rm", "dpo"):
        yield from untouched(c, "agent", "is not for --mode=rm or dpo")
