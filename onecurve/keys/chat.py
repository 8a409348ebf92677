"""
What a chat template gets beside the prompt.
Code: `encode_prompts` of rewards.py, onecurve/agents/chat.py. Manual: docs/data.md.
"""

from configurator import arguments, untouched

system_prompt = ""  # a first message with chat_template; '': the template's own, if it has one
chat_template_args = ""  # such as 'enable_thinking=False'


def rules(c):
    if not c.chat_template:
        yield from untouched(c, "system_prompt", "is for --chat_template")
    if not (c.agent or c.chat_template):
        yield from untouched(c, "chat_template_args", "is for --agent or --chat_template")
    yield from arguments(c, "chat_template_args", "arguments of the chat template, such as 'enable_thinking=False'")
