"""The runner of a page's blocks runs what it should, and finds what is wrong."""

import pytest
from run_page import PageError, PageRun

GOOD = """
# A page

<!-- setup
echo hidden > setup.txt
-->

```python
# made/greet.py
print("hello 1.5e-3 world")
```

```bash
pip install nothing-of-this-name
cat setup.txt   # a comment
cd made
python -c "print(open('greet.py').read())"
```

```text
hidden
...
print("hello 2 ...")
```

1. In a list:

   ```python
   numbers = [1,
              2]
   ```

```python
print(sum(numbers), "of 7, loss", 0.5)
```

```text
4 of 9, loss 0.55
```

<!-- fails -->
```bash
test -f greet.py
cat absent.txt
```

```text
No such file
```

<!-- not run: it would fail -->
```bash
false
```

```yaml
model: !new:torch.nn.Linear {in_features: 3}
```

```diff
-anything
+at all
```

```text
a picture, not an output
```
"""


def test_page_that_is_right(tmp_path):
    PageRun("good.md", tmp_path).run(GOOD)
    assert (tmp_path / "made" / "greet.py").is_file()
    assert (tmp_path / "setup.txt").read_text() == "hidden\n"


WRONG = {
    "a command fails": "```bash\nfalse\ntrue\n```",
    "none fails": "<!-- fails -->\n```bash\ntrue\n```",
    "an earlier one fails": "<!-- fails -->\n```bash\nfalse\ntrue\n```",
    "another output": "```bash\necho fp16 ends\n```\n\n```text\nfp32 ends\n```",
    "another order": "```bash\necho b; echo a\n```\n\n```text\na\nb\n```",
    "a failure in a pipe": "```bash\nfalse | cat\n```",
    "another loss": "```bash\necho loss 0.98\n```\n\n```text\nloss 17.3\n```",
    "another epoch": "```bash\necho epoch 2 train\n```\n\n```text\nepoch 20 train\n```",
    "an output of nothing": "```bash\necho a\n```\n\nIt prints:\n\n```text\na\n```",
    "a part of a word": "```bash\necho overflows\n```\n\n```text\nover\n```",
    "YAML": "```yaml\na: [1\n```",
    "JSON": "```json\n{'a': 1}\n```",
    "Python": "```python\nundefined_name\n```",
    "an interpreter that ends": "```python\nimport os\nos._exit(0)\n```",
    "no language": "```\nls\n```",
}


@pytest.mark.parametrize("page", WRONG.values(), ids=WRONG)
def test_page_that_is_wrong(tmp_path, page):
    with pytest.raises(PageError, match=r"wrong.md:\d+: this block"):
        PageRun("wrong.md", tmp_path).run(f"# A page\n\n{page}\n")


def test_error_of_a_block_names_the_line_of_the_page(tmp_path):
    with pytest.raises(PageError, match=r'File "wrong.md", line 4, in'):
        PageRun("wrong.md", tmp_path).run("# A page\n\n```python\n1 / 0\n```\n")
