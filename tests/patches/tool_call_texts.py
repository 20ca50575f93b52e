"""Two tool calls, or one, behind a text in the format of each of SGLang's tool-call parsers."""

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
_DSML = (
    "Hi <｜DSML｜{0}>\n"
    '<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris x</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="ping">\n</｜DSML｜invoke>\n</｜DSML｜{0}>'
)
_INVOKE = (
    '<invoke name="weather">\n<parameter name="city">Paris x</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="ping">\n</invoke>\n'
)
_FUNCTION = (
    "Hi <tool_call>\n<function=weather>\n<parameter=city>{0}Paris x{0}</parameter>\n"
    "<parameter=days>{0}3{0}</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=ping>\n</function>\n</tool_call>"
)

TWO_CALLS = {
    "apertus2509": f'Hi <|tools_prefix|>[{{"weather": {ARGUMENTS}}}, {{"ping": {{}}}}]'
    "<|tools_suffix|>",
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
    "deepseekv32": _DSML.format("function_calls"),
    "deepseekv4": _DSML.format("tool_calls"),
    "dots": f"Hi <dots_function_call>\n{_INVOKE}</dots_function_call>",
    "glm45": f"Hi <tool_call>weather\n{_LINES}\n</tool_call>\n<tool_call>ping\n</tool_call>",
    "glm47": f"Hi <tool_call>weather{_KEYS.format('')}</tool_call><tool_call>ping</tool_call>",
    "hermes": _TAGGED,
    "hunyuan": f"Hi <tool_calls>\n<tool_call>weather<tool_sep>\n{_LINES}\n</tool_call>\n"
    "<tool_call>ping<tool_sep>\n</tool_call>\n</tool_calls>",
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
    "mistral": f"Hi [TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]ping[ARGS]{{}}",
    "poolside_v1": f"Hi <tool_call>weather\n{_LINES}\n</tool_call>\n<tool_call>ping\n</tool_call>",
    "pythonic": '[weather(city="Paris x", days=3), ping()]',
    "qwen25": _TAGGED,
    "qwen3_coder": _FUNCTION.format("\n"),
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
