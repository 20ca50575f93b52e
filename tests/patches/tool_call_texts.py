"""Tool calls, and reasoning, in the format of each of SGLang's parsers."""

from __future__ import annotations

ARGUMENTS = '{"city": "Paris x", "days": 3}'
_KEYS = (
    "<arg_key>city</arg_key>{0}<arg_value>Paris x</arg_value>{0}"
    "<arg_key>days</arg_key>{0}<arg_value>3</arg_value>"
)
_LINES = _KEYS.format("\n")
_TAGGED = (
    f'Hi <tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
)


def _marked(mark: str, block: str, space: str, line: str) -> str:
    """The format of DeepSeek and GigaChat. space: before each tag's name. line: between tags."""
    open_, close = f"<｜{mark}｜{space}", f"</｜{mark}｜{space}"
    tags = (
        f"{open_}{block}>",
        f'{open_}invoke name="weather">',
        f'{open_}parameter name="city" string="true">Paris x{close}parameter>',
        f'{open_}parameter name="days" string="false">3{close}parameter>',
        f"{close}invoke>",
        f'{open_}invoke name="ping">',
        f"{close}invoke>",
        f"{close}{block}>",
    )
    return "Hi " + line.join(tags)


_INVOKE = (
    '<invoke name="weather">\n<parameter name="city">Paris x</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="ping">\n</invoke>\n'
)
_FUNCTION = (
    "Hi <tool_call>\n<function=weather>\n<parameter=city>{0}Paris x{0}</parameter>\n"
    "<parameter=days>{0}3{0}</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=ping>\n</function>\n</tool_call>"
)

_M3 = "]<]minimax[>["
_PARAMETER = '<rfl:parameter name="{}">\n{}\n</rfl:parameter>'
_BEAM = (
    " to=weather<|channel|>analysis <|constrain|>xml<|message|>"
    f"{_PARAMETER.format('city', 'Paris x')}{_PARAMETER.format('days', '3')}"
    "<|end|><|start|>assistant to=ping<|channel|>analysis <|constrain|>xml<|message|><|call|>"
)

TWO_CALLS = {
    "apertus2509": f'Hi <|tools_prefix|>[{{"weather": {ARGUMENTS}}}, {{"ping": {{}}}}]'
    "<|tools_suffix|>",
    "beam": _BEAM,
    "cohere_command4": 'Hi <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", '
    f'"parameters": {ARGUMENTS}}}, {{"tool_call_id": "1", "tool_name": "ping", '
    '"parameters": {}}]<|END_ACTION|>',
    "deepseekv3": "Hi <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseekv31": "Hi <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    f"{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜>{{}}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseekv32": _marked("DSML", "function_calls", "", "\n"),
    "deepseekv4": _marked("DSML", "tool_calls", "", "\n"),
    "deepseekv41": _marked("DSML", "calls", " ", "\n"),
    "dots": f"Hi <dots_function_call>\n{_INVOKE}</dots_function_call>",
    "gemma4": 'Hi <|tool_call>call:weather{city:<|"|>Paris x<|"|>,days:3}<tool_call|>'
    "<|tool_call>call:ping{}<tool_call|>",
    "gigachat35": _marked("GCML", "tool_calls", "", ""),
    "glm45": f"Hi <tool_call>weather\n{_LINES}\n</tool_call>\n<tool_call>ping\n</tool_call>",
    "glm47": f"Hi <tool_call>weather{_KEYS.format('')}</tool_call><tool_call>ping</tool_call>",
    "hermes": _TAGGED,
    "hunyuan": f"Hi <tool_calls>\n<tool_call>weather<tool_sep>\n{_LINES}\n</tool_call>\n"
    "<tool_call>ping<tool_sep>\n</tool_call>\n</tool_calls>",
    "iquest_q1": f"Hi <iquest_tool_call>weather{_KEYS.format('')}</iquest_tool_call>"
    "<iquest_tool_call>ping</iquest_tool_call>",
    "k2_horizon": 'Hi <ifm|tool_calls>\n<ifm|tool_call>{"name": "weather", "arguments": '
    f'{ARGUMENTS}}}</ifm|tool_call>\n<ifm|tool_call>{{"name": "ping", "arguments": {{}}}}'
    "</ifm|tool_call>\n</ifm|tool_calls>",
    "kimi_k2": "Hi <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>"
    "functions.ping:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "lfm2": 'Hi <|tool_call_start|>[weather(city="Paris x", days=3), ping()]<|tool_call_end|>',
    "ling3": f"Hi <tool_call>weather\n{_LINES}\n</tool_call>\n<tool_call>ping</tool_call>",
    "llama3": f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}};'
    '{"name": "ping", "parameters": {}}',
    "mimo": _FUNCTION.format(""),
    "minicpm5": 'Hi <function name="weather"><param name="city">Paris x</param>'
    '<param name="days">3</param></function>\n<function name="ping"></function>',
    "minimax-m2": f"Hi <minimax:tool_call>\n{_INVOKE}</minimax:tool_call>",
    "minimax-m3": f'Hi {_M3}<tool_call>\n{_M3}<invoke name="weather">{_M3}<city>Paris x{_M3}</city>'
    f'{_M3}<days>3{_M3}</days>{_M3}</invoke>\n{_M3}<invoke name="ping">{_M3}</invoke>\n'
    f"{_M3}</tool_call>",
    "mistral": f"Hi [TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]ping[ARGS]{{}}",
    "muse": " to=user<|message|>Hi <|eom|><|start|>assistant to=functions.weather<|message|>"
    '<atem:function_calls>\n<atem:invoke name="weather">\n'
    '<atem:parameter name="city">Paris x</atem:parameter>\n'
    '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n'
    '<atem:invoke name="ping">\n</atem:invoke>\n</atem:function_calls><|eot|>',
    "poolside_v1": f"Hi <tool_call>weather\n{_LINES}\n</tool_call>\n<tool_call>ping\n</tool_call>",
    "pythonic": '[weather(city="Paris x", days=3), ping()]',
    "qwen25": _TAGGED,
    "qwen3_coder": _FUNCTION.format("\n"),
    "response_template": _BEAM,
    "spark25": f"Hi <tool_call>weather\n{_KEYS.format('')}\n</tool_call>\n"
    "<tool_call>ping\n</tool_call>",
    "step3": "Hi <｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="weather">\n<steptml:parameter name="city">Paris x'
    '</steptml:parameter>\n<steptml:parameter name="days">3</steptml:parameter>\n'
    "</steptml:invoke><｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="ping">\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>',
    "trinity": _TAGGED,
}
ONE_CALL = {
    "gigachat3": f'Hi <|function_call|>{{"name": "weather", "arguments": {ARGUMENTS}}}',
    "gpt-oss": "<|channel|>commentary to=functions.weather<|constrain|>json<|message|>"
    f"{ARGUMENTS}<|call|>",
    "inkling": "<|message_model|>weather<|content_invoke_tool_json|>"
    f'{{"name":"weather","args":{ARGUMENTS}}}<|end_message|>',
    "interns1": f'Hi <|action_start|> <|plugin|>\n{{"name": "weather", "parameters": {ARGUMENTS}}}'
    "<|action_end|>",
    "kimi_k3": "<|open|>response<|sep|>Hi<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris x<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
}

THOUGHT = "So, 1 < 2.\nThen"
_THINK = f"<think>{THOUGHT}</think>"
_CHANNELS = (
    f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
    "<|channel|>final<|message|>Yes.<|return|>"
)
# The thought, and the answer `Yes.`
REASONING = {
    "apertus2509": f"<|inner_prefix|>{THOUGHT}<|inner_suffix|>Yes.",
    "beam": _CHANNELS,
    "cohere_command4": f"{THOUGHT}<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>",
    "deepseek-r1": f"{THOUGHT}</think>\n\nYes.",
    "deepseek-v3": f"{_THINK}\n\nYes.",
    "deepseek-v4": f"{_THINK}\n\nYes.",
    "gemma4": f"<|channel>thought\n{THOUGHT}<channel|>Yes.",
    "glm45": f"{_THINK}\n\nYes.",
    "gpt-oss": _CHANNELS,
    "granite_thinking_parser": f"{_THINK}\n\nYes.",
    "hunyuan": f"{_THINK}\n\nYes.",
    "inkling": f"<|message_model|><|content_thinking|>{THOUGHT}<|end_message|><|message_model|>"
    "<|content_text|>Yes.<|end_message|><|content_model_end_sampling|>",
    "iquest_q1": f"{_THINK}\n\nYes.",
    "k2_horizon": f"{THOUGHT}</ifm|think>\nYes.",
    "kimi": f"◁think▷{THOUGHT}◁/think▷Yes.",
    "kimi_k2": f"{_THINK}Yes.",
    "kimi_k3": f"<|open|>think<|sep|>{THOUGHT}<|close|>think<|sep|><|open|>response<|sep|>Yes."
    "<|close|>response<|sep|><|close|>message<|sep|>",
    "ling3": f"{_THINK}\n\nYes.",
    "mimo": f"{_THINK}\n\nYes.",
    "minimax-m3": f"<mm:think>{THOUGHT}</mm:think>Yes.",
    "mistral": f"[THINK]{THOUGHT}[/THINK]Yes.",
    "muse": f" to=self<|message|>{THOUGHT}<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>",
    "nemotron_3": f"{_THINK}\n\nYes.",
    "poolside_v1": f"{_THINK}\n\nYes.",
    "qwen3": f"{_THINK}\n\nYes.",
    "response_template": _CHANNELS,
}
