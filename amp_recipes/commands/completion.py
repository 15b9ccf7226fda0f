"""Prints a script for the shell that completes run options, the keys of a YAML, and what `amp-recipes` takes.

Everything that Python knows is written into the script, so that a press of TAB starts no Python. The keys of a YAML
are read by awk, as text. Only names of plain characters are offered, and nothing that a file holds is ever evaluated:
the script has no `eval`, and no `compgen -W`, which would run what a key says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from amp_recipes.config.options.run_options import OPTION_TYPES, RunOptions, option_choices

SHELLS = ("bash", "zsh")

# What a recipe's script takes beside run options and the keys of its YAML.
_SCRIPT_OPTIONS = (
    *("help", "check", "show-config", "diagnose", "replay", "trust"),
    *("allow-config-change", "sweep", "sweep-trials"),
    *("diagnose-minutes", "diagnose-windows", "diagnose-tolerance"),
)


@dataclass(frozen=True)
class Words:
    """The words that may follow a subcommand of `amp-recipes`.

    options: its own (`--to`), each with the values that it takes, where they are few; choices: of its first argument;
    of_recipe: whether a recipe's options may follow.
    """

    options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    choices: Sequence[str] = ()
    of_recipe: bool = False


def completion_script(shell: str, commands: Mapping[str, Words]) -> str:
    """The script for `shell` (bash or zsh). commands: the subcommands of `amp-recipes`, by name."""
    parts = {
        "@HEAD@": _HEADS[shell],
        "@OPTIONS@": " ".join(f"--{name}" for name in (*RunOptions(), *_SCRIPT_OPTIONS)),
        "@VALUES@": _values(),
        "@COMMANDS@": " ".join(commands),
        "@WORDS@": _words(commands),
        "@AWK@": _AWK.strip("\n"),
    }
    script = _SCRIPT
    for mark, text in parts.items():
        script = script.replace(mark, text)
    return script.lstrip("\n")


def _values() -> str:
    """Branches of a `case` over run options: the values that each takes, where they are few."""
    by_values: dict[str, list[str]] = {}
    for name, kind in OPTION_TYPES.items():
        choices = ("true", "false") if kind is bool else option_choices(name)
        if choices:
            by_values.setdefault(" ".join(choices), []).append(f"--{name}")
    return "\n".join(f'        {"|".join(names)}) reply="{values}" ;;' for values, names in by_values.items())


def _words(commands: Mapping[str, Words]) -> str:
    """Branches of a `case` over subcommands: what each takes."""
    lines = []
    for name, words in commands.items():
        assigned = f'options="{" ".join(words.options)}" choices="{" ".join(words.choices)}"'
        lines.append(f"        {name}) {assigned} of_recipe={'yes' if words.of_recipe else ''}")
        for option, values in words.options.items():
            if values:
                lines.append(f'            [[ $previous == {option} ]] && values="{" ".join(values)}"')
        lines.append("            ;;")
    return "\n".join(lines)


_HEADS = {
    "bash": """\
# Completion for bash. Write it into a file, and read that file in ~/.bashrc:
#     amp-recipes completion bash > ~/.amp-recipes.bash
#     echo 'source ~/.amp-recipes.bash' >> ~/.bashrc
""",
    "zsh": """\
# Completion for zsh. Write it into a file, and read that file in ~/.zshrc, after compinit:
#     amp-recipes completion zsh > ~/.amp-recipes.zsh
#     echo 'source ~/.amp-recipes.zsh' >> ~/.zshrc
(( ${+functions[compdef]} )) || { autoload -Uz compinit && compinit -i; }
autoload -Uz bashcompinit && bashcompinit
""",
}

# Prints a line for each key without keys below it, dotted; and `@prefix file` for each `!include:`. Understands block
# style, lists of mappings and `{...}` on one line. A key of other characters than a name's hides what is below it.
_AWK = r"""
function pop_to(indent, with_items) {
    while (top && (at[top] > indent || (at[top] == indent && (with_items || item[top])))) {
        if (leaf[top] && !hidden[top]) print path[top]
        top--
    }
}
function push(indent, name, is_item, is_hidden) {
    top++
    at[top] = indent; item[top] = is_item; count[top] = 0
    path[top] = (top > 1 ? path[top - 1] "." : "") name
    hidden[top] = is_hidden || (top > 1 && hidden[top - 1])
    leaf[top] = !is_item
    if (!is_item) for (i = 1; i < top; i++) leaf[i] = 0
}
function add_flow(text,    parts, n, i, name) {
    while (sub(/\[[^][]*\]/, "", text)) { }
    if (text !~ /^\{[^{}"]*\}/ || hidden[top]) return
    sub(/^\{/, "", text); sub(/\}.*/, "", text)
    n = split(text, parts, ",")
    for (i = 1; i <= n; i++) {
        name = parts[i]
        sub(/^ */, "", name)
        if (name ~ /^[A-Za-z_][A-Za-z0-9_-]*:( |$)/) {
            sub(/:.*/, "", name)
            print path[top] "." name
            leaf[top] = 0
        }
    }
}
BEGIN { top = 0; block = -1 }
NR > 20000 { exit }
{
    text = $0
    sub(/\r$/, "", text)
    if (text ~ /^ *(#|$)/) next
    match(text, /^ */)
    indent = RLENGTH
    text = substr(text, indent + 1)
    if (block >= 0 && indent > block) next
    block = -1
    while (text ~ /^-( |$)/) {
        pop_to(indent, 0)
        if (!top) exit
        push(indent, count[top]++, 1, 0)
        match(text, /^- */)
        indent += RLENGTH
        text = substr(text, RLENGTH + 1)
    }
    if (text !~ /^[^ #].*:( |$)/ && text !~ /^[A-Za-z_][A-Za-z0-9_-]*:( |$)/) next
    pop_to(indent, 1)
    name = text
    if (name !~ /^[A-Za-z_][A-Za-z0-9_-]*:( |$)/) { push(indent, "?", 0, 1); next }
    sub(/:.*/, "", name)
    push(indent, name, 0, 0)
    value = substr(text, length(name) + 2)
    sub(/^ */, "", value)
    sub(/^&[^ ]* */, "", value)
    if (value ~ /^!include:[^ ]/) {
        file = value
        sub(/^!include:/, "", file); sub(/ .*/, "", file)
        if (!hidden[top]) print "@" path[top] " " file
        leaf[top] = 0
        next
    }
    sub(/^![^ ]* */, "", value)
    sub(/^&[^ ]* */, "", value)
    if (value ~ /^[|>]/) block = indent
    else if (value ~ /^\{/) add_flow(value)
}
END { pop_to(-1, 1) }
"""

_SCRIPT = r"""
@HEAD@
# Another name of a recipe's script than train.py:    complete -o default -F _amp_recipes_script NAME.py

# Adds to COMPREPLY which of the words in $1 begin with $2.
_amp_recipes_offer() {
    local word newline=$'\n'
    while IFS= read -r word; do
        if [[ -n $word && $word == "$2"* ]]; then
            COMPREPLY+=("$word")
        fi
    done <<< "${1// /$newline}"
}

# Prints the dotted keys of the YAML $1, each behind $2; $3: how many files deep its includes are followed.
_amp_recipes_keys() {
    local line rest folder=. included=0
    [[ -f $1 && -r $1 ]] || return 0
    [[ $1 == */* ]] && folder=${1%/*}
    head -c 1048576 < "$1" | LC_ALL=C awk '
@AWK@
' | while IFS= read -r line; do
        if [[ $line == @* ]]; then
            # A file that includes itself many times must not hold up the shell.
            if (( $3 > 0 && included < 10 )); then
                included=$((included + 1))
                rest=${line#@}
                _amp_recipes_keys "$folder/${rest#* }" "$2${rest%% *}." "$(($3 - 1))"
            fi
        else
            printf '%s\n' "$2$line"
        fi
    done
}

# Sets reply to the values that the run option $1 takes, separated by spaces.
_amp_recipes_values() {
    reply=""
    case "$1" in
@VALUES@
    esac
}

# Sets typed to the words of the command line up to the cursor, current to the last of them, previous to the one before
# it. bash has split them at "=" and ":", zsh has not.
_amp_recipes_typed() {
    if [[ -n ${ZSH_VERSION:-} ]]; then
        typed=("${COMP_WORDS[@]:0:$((COMP_CWORD + 1))}")
    else
        # Without -r, so that a backslash keeps a space in its word.
        read -a typed <<< "${COMP_LINE:0:$COMP_POINT}"
        if [[ ${COMP_LINE:0:$COMP_POINT} == *[[:space:]] ]]; then
            typed+=("")
        fi
    fi
    current=${typed[$((${#typed[@]} - 1))]}
    previous=""
    if (( ${#typed[@]} > 1 )); then
        previous=${typed[$((${#typed[@]} - 2))]}
    fi
}

# Whether the words in typed run a recipe. Sets yaml to its YAML file, empty where there is none yet.
_amp_recipes_is_recipe() {
    local word plain script=""
    yaml=""
    for word in "${typed[@]:0:$((${#typed[@]} - 1))}"; do
        plain=${word//\\/}
        if [[ ! -f $plain ]]; then
            plain=${plain//[\"\']/}
        fi
        if [[ $plain == "~/"* ]]; then
            plain=$HOME/${plain:2}
        fi
        if [[ -z $script && $plain == *.py ]]; then
            script=$plain
        elif [[ -z $yaml && ( $plain == *.yaml || $plain == *.yml ) && $plain != -* ]]; then
            yaml=$plain
        fi
    done
    if [[ -n $script && -f $script ]]; then
        LC_ALL=C grep -qs amp_recipes < "$script"
    else
        [[ -n $yaml ]]
    fi
}

# Completes $1, the word at the cursor behind $2, as an option of a recipe or the value of one.
_amp_recipes_option() {
    local reply name value
    if [[ $1 == --*=* ]]; then
        name=${1%%=*}
        value=${1#*=}
        _amp_recipes_values "$name"
        if [[ -n ${ZSH_VERSION:-} || $COMP_WORDBREAKS != *=* ]]; then
            _amp_recipes_offer "${reply:+$name=${reply// / $name=}}" "$1"
        else
            _amp_recipes_offer "$reply" "$value"
        fi
        return
    fi
    if [[ $1 == -* ]]; then
        # Sorted, as the YAML may set what is a run option too.
        _amp_recipes_offer "$({
            printf '%s\n' @OPTIONS@
            _amp_recipes_keys "$yaml" "--" 2
        } | LC_ALL=C sort -u)" "$1"
    elif [[ $2 == --* ]]; then
        _amp_recipes_values "$2"
        _amp_recipes_offer "$reply" "$1"
    fi
}

# python train.py config.yaml --...
_amp_recipes_script() {
    local typed yaml current previous
    COMPREPLY=()
    _amp_recipes_typed
    if _amp_recipes_is_recipe; then
        _amp_recipes_option "$current" "$previous"
    fi
}

# amp-recipes ...
_amp_recipes_command() {
    local typed yaml current previous options="" choices="" values="" of_recipe=""
    COMPREPLY=()
    _amp_recipes_typed
    if (( ${#typed[@]} == 2 )); then
        _amp_recipes_offer "@COMMANDS@ --help --version" "$current"
        return
    fi
    case "${typed[1]}" in
@WORDS@
    esac
    if (( ${#typed[@]} == 3 )); then
        _amp_recipes_offer "$choices" "$current"
    fi
    if [[ -n $values ]]; then
        _amp_recipes_offer "$values" "$current"
    fi
    if [[ $current == -* ]]; then
        _amp_recipes_offer "$options" "$current"
    fi
    if [[ -n $of_recipe ]]; then
        _amp_recipes_is_recipe
        _amp_recipes_option "$current" "$previous"
    fi
}

complete -o default -F _amp_recipes_script python python3 torchrun train.py
complete -o default -F _amp_recipes_command amp-recipes
"""
