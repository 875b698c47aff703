#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes headers and pages of this repository in the form that Doxygen reads: FILE becomes FOLDER/FILE, which
Doxygen reads instead (INPUT_FILTER in scripts/build_reference.sh).

usage: filter.py FOLDER FILE... (from the top of the repository)

The line numbers stay the same, so that Doxygen's warnings name the right line.

Headers:
- The comment at the top describes the file. It also describes the class that the file is named after.
- A comment holds for all overloads of a function that directly follow.
- A comment behind `enum class X { … };` describes X. XOptions, XResult and classes of errors get a sentence.
- `namespace detail` and what stands below `// For libddp's own parts` is hidden.
- Settings get the key, the allowed values and, if the header has no comment, the meaning from
docs/configuration.md.
- Functions that have one meaning everywhere (describe_fields, for_each_tensor, moves) get a sentence.

Pages: headings get anchors like GitHub's, links lead to pages, headers or (finish.py) copies of other files,
and names of classes in code become links. Recipes become subpages of their index.
"""

import functools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADERS = ("libddp/include", "libddp/ops/include", "models/include")
SECTIONS = {
    "TrainOptions": "train.", "DataOptions": "data.", "RandomResizedCropOptions": "data.",
    "RandAugmentOptions": "data.rand_augment_", "SamplerOptions": "sampler.", "LoaderOptions": "loader.",
    "DdpOptions": "ddp.", "OptimizerOptions": "optimizer.", "LrScheduleOptions": "lr_schedule.",
    "AmpOptions": "amp.",
    "CheckpointOptions": "checkpoint.", "MetricsOptions": "metrics.", "ContextOptions": "context.",
    "CommunicatorOptions": "context.communicator.", "ControlPlaneOptions": "context.control_plane.",
    "TokenDataOptions": "tokens.", "MaskingOptions": "masking.",
}  # fmt: skip
FUNCTION = re.compile(r"^\s*(?!return\b|using\b)[\w:&<>*,~ \[\]]*?((?:\boperator *[^\s(]+|[\w~]+)) ?\(")
KNOWN = (  # functions that mean the same in all headers
    (re.compile(r"\bdescribe_fields\((\w+)&"), r"Describes the settings of \1: see FieldVisitor."),
    (re.compile(r"\bfor_each_tensor\((\w+)&"), r"Visits the tensors of \1: see visit_tensors.hpp."),
    (re.compile(r"\breset\(\) override;"), "Makes all children anew, as torch::nn::Cloneable requires."),
    (re.compile(r"\boperator double\(\)"), "The same as value()."),
    (re.compile(r"^\s*(\w+)\(\1&&\)"), "Moves. Only destroy the old object, or assign to it."),
    (re.compile(r"^\s*\w+& operator=\(\w+&&\)"), "Moves. Only destroy the old object, or assign to it."),
    (re.compile(r"^\s*(?:explicit )?(\w+Error|Stop)\(const std::string& message\)"),
     "An error with this message and the exit code of its class."),
)  # fmt: skip


def page_label(path):
    """The label of a page: docs/tutorial.md -> page_docs_tutorial."""
    return "page_" + re.sub(r"\W", "_", str(path).removesuffix(".md"))


def slug(heading):
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def link_pages(text):
    """Turns `docs/x.md, "Heading"` (or the beginning of a heading) and `docs/x.md` in a comment into
    links."""

    def replace(match):
        page, heading = match[1], match[3]
        label = page_label(page)
        if heading:
            headings = re.findall(r"^#+ (.*)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
            label += "__" + slug(next((h for h in headings if h.startswith(heading)), heading))
        return f'@ref {label} "{page}{", " + heading if heading else ""}"'

    return re.sub(r'(docs/\w+\.md)(, "([^"]+)")?', replace, text)


def escape(text):
    """Hides what Doxygen would take for a command, a tag or a link. Code in backticks stays."""
    parts = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(parts), 2):
        part = re.sub(r"([@\\#%])", r"\\\1", parts[i])
        part = re.sub(r"<(?=[\w/!.])", "&lt;", part)
        parts[i] = link_pages(part)
    for i in range(1, len(parts), 2):
        if "<" in parts[i]:
            code = parts[i][1:-1].replace("&", "&amp;").replace("<", "&lt;").replace(".", r"\.")
            parts[i] = f"<code>{code}</code>"
    return "".join(parts)


def comment_lines(texts):
    """Converts the lines of one comment. Lines that are indented behind an empty line are code."""
    out, in_code = [], False
    for i, text in enumerate(texts):
        following = next((t for t in texts[i + 1 :] if t), "")
        if in_code:
            out.append(text)
            in_code = following.startswith("  ")
            if not in_code:
                out[-1] += " @endcode"
        elif not text and following.startswith("  "):
            language = ".cpp" if re.search(r"[;{]", " ".join(texts[i:])) else ".unparsed"
            out.append("@code{" + language + "}")
            in_code = True
        else:
            out.append(escape(text))
    return out


@functools.cache
def settings():
    """The rows of docs/configuration.md: key -> (allowed values, meaning)."""
    rows = {}
    for line in (ROOT / "docs/configuration.md").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\| `([\w.]+)` \| .*? \| ([^|]+) \| (.+) \|$", line):
            rows.setdefault(match[1], (match[2], match[3]))
    return rows


class Header:
    """The lines of a header, which the methods convert in place."""

    def __init__(self, path, lines):
        self.path = path
        self.name = str(path.relative_to(next(h for h in HEADERS if path.is_relative_to(h))))
        self.lines = lines
        self.rows = settings() if any(name in "\n".join(lines) for name in SECTIONS) else {}

    def convert(self):
        self.convert_comments()
        self.hide()
        # Of each open brace: the struct's name, "" for a namespace or class, None for a function's body.
        scopes = []
        previous = None  # name and comment of the function in the lines directly above
        i = 0
        while i < len(self.lines):
            code = self.code(i)
            if not code:
                previous = previous if self.is_comment(i) else None
            elif code.startswith("#") or code.startswith("}") or code.endswith(":") or None in scopes:
                self.track(scopes, code)
            else:
                first = i
                while not re.search(r"[;{}]$", self.code(i)) and i + 1 < len(self.lines):
                    i += 1
                previous = self.declaration(first, i, scopes, previous)
            i += 1
        return self.lines

    def convert_comments(self):
        """The comment at the top, and all comments with three slashes."""
        end = next(i for i, line in enumerate(self.lines) if not line.startswith("//"))
        texts = comment_lines([line[2:].removeprefix(" ") for line in self.lines[1:end]])
        self.lines[:end] = ["/// @file", *("/// " + text for text in texts)]
        i = end
        while i < len(self.lines):
            first = i
            while i < len(self.lines) and re.match(r" *///(?!<)", self.lines[i]):
                i += 1
            if i > first:
                texts = [line.strip()[3:].removeprefix(" ") for line in self.lines[first:i]]
                for k, text in enumerate(comment_lines(texts)):
                    self.lines[first + k] = f"{match_indent(self.lines[first])}/// {text}"
                continue
            if (place := self.lines[i].find("///< ")) >= 0:
                self.lines[i] = self.lines[i][: place + 5] + escape(self.lines[i][place + 5 :])
            i += 1

    def hide(self):
        """Hides what is not public: namespace detail, and declarations below `// For libddp's own parts`."""
        for i, line in enumerate(self.lines):
            if line == "namespace detail {":
                closing = re.compile(r"\}(  // namespace detail)?$")
                end = next(k for k in range(i, len(self.lines)) if closing.match(self.lines[k]))
            elif line.strip().startswith("// For libddp's own parts"):
                end = next(k for k in range(i, len(self.lines)) if not self.lines[k]) - 1
            else:
                continue
            self.lines[i] = "/** @cond */ " + line
            self.lines[end] += " /** @endcond */"

    def code(self, i):
        """Line i without its comment."""
        return re.sub(r"//.*|/\*.*?\*/", "", self.lines[i]).strip()

    def is_comment(self, i):
        return self.lines[i].lstrip().startswith("//")

    def track(self, scopes, code, scope=None):
        """Follows the braces of `code`; the first that it opens is `scope`."""
        for brace in re.findall(r"[{}]", code):
            if brace == "{":
                scopes.append(scope)
                scope = None
            else:
                scopes.pop()

    def comment_of(self, first, last):
        """The text of the comment before or behind a declaration."""
        start = first
        while start and re.match(r" *///(?!<)", self.lines[start - 1]):
            start -= 1
        texts = [line.strip()[4:] for line in self.lines[start:first]]
        if (place := self.lines[last].find("///< ")) >= 0:
            texts.append(self.lines[last][place + 5 :])
            texts += [t.strip()[5:] for t in self.lines[last + 1 : last + 4] if t.strip().startswith("///<")]
        return " ".join(texts)

    def document(self, i, text):
        indent = match_indent(self.lines[i])
        self.lines[i] = f"{indent}/** {text} */ {self.lines[i].lstrip()}"

    def declaration(self, first, last, scopes, previous):
        """Handles the declaration in these lines; returns its name and comment if it is a function."""
        text = " ".join(self.code(k) for k in range(first, last + 1))
        bare = re.sub(r"^template <.*?> (?=class|struct)", "", text)
        if module := re.match(r"TORCH_MODULE\((\w+)\);", text):
            name = module[1]
            self.lines[first] = (
                f"/** Holds a {name}Impl, as torch::nn's holders do: copies share the module. */ "
                f"class {name} : public torch::nn::ModuleHolder<{name}Impl> {{}};"
            )
            return None
        comment = self.comment_of(first, last)
        if match := re.match(r"(class|struct|enum class|namespace) ?([\w:]*).*\{", bare):
            self.compound(first, last, match[2], comment)
            self.track(scopes, text, match[2] if match[1] == "struct" else "")
            return None
        name = (match := FUNCTION.match(text)) and match[1]
        if name and not comment:
            known = (m.expand(sentence) for pattern, sentence in KNOWN if (m := pattern.search(text)))
            comment = next(known, "") or (previous[1] if previous and previous[0] == name else "")
            if comment:
                self.document(first, comment)
        elif not name and scopes:
            self.member(first, last, SECTIONS.get(scopes[-1]), text, comment)
        self.track(scopes, text)
        return (name, comment) if name else None

    def compound(self, first, last, name, comment):
        """Documents a class, struct or enumeration without a comment before it."""
        place = self.lines[last].find("///< ")
        code = re.search(r"ExitCode::\w+", self.lines[last + 1])
        key = self.key_of(name)
        if place >= 0:
            text = self.lines[last][place + 5 :]
            self.lines[last] = self.lines[last][:place]
        elif comment or name == "Error":
            return
        elif name.removesuffix("Impl").lower() == self.path.stem.replace("_", ""):
            text = f"@copydoc {self.name}"
        elif name in SECTIONS:
            section = SECTIONS[name].rstrip("._")
            text = link_pages(f"Settings `{section}`: docs/configuration.md describes each of them.")
        elif owner := self.owner(name):
            text = f"Options of {owner}." if name.endswith("Options") else f"The result of {owner}."
        elif code:
            text = f"The Error of {code[0]}: @copybrief {code[0]}"
        elif key:
            text = f"Values of the setting `{key}`: {escape(self.rows[key][1])}"
        else:
            return
        self.document(first, text)

    def key_of(self, enumeration):
        """The key of the setting of this type."""
        struct = ""
        for line in self.lines:
            if match := re.match(r"(?:/\*\*.*?\*/ )?struct (\w+)", line):
                struct = match[1]
            elif match := re.match(rf" .*\b{enumeration} (\w+) = {enumeration}::", line):
                key = SECTIONS.get(struct, "") + match[1]
                return key if key in self.rows else None
        return None

    def owner(self, name):
        """The function or class of this header that XOptions or XResult belongs to."""
        stem = re.sub(r"(Options|Result)$", "", name)
        function = re.sub(r"(?<!^)(?=[A-Z])", "_", stem).lower()
        if stem != name:
            for line in self.lines:
                if re.match(rf"\S+ {function}\(", line):
                    return f"{function}()"
                if re.match(rf"class {stem} .*\{{", line):
                    return stem
        return None

    def member(self, first, last, section, text, comment):
        """Adds key, allowed values and meaning to a setting, and a link to a struct of settings."""
        several = re.match(r"([\w:]+) (\w+(?:, \w+)+);", text)
        if several and comment:
            each = (f"/** {comment} */ {several[1]} {name};" for name in several[2].split(", "))
            self.lines[first] = match_indent(self.lines[first]) + " ".join(each)
            return
        match = re.match(r"([\w:<>, ]+) (\w+)(?: = .*|\{.*\})?;", text)
        if not match:
            return
        key = next((k for k in (f"{section}{match[2]}", f"{section}{match[2]}_ms") if k in self.rows), None)
        if key:
            allowed, meaning = self.rows[key]
            suffix = f"Key `{key}`: {escape(allowed)}."
            if not comment:
                self.document(first, f"{escape(meaning)} {suffix}")
                return
            while last + 1 < len(self.lines) and self.lines[last + 1].lstrip().startswith("///<"):
                last += 1
            place = last if "///< " in self.lines[last] else first - 1
            self.lines[place] += f"{'' if comment[-1] in '.?' else '.'} {suffix}"
        elif not comment and match[1] in SECTIONS:
            self.document(first, f"Settings `{SECTIONS[match[1]].rstrip('._')}`: see {match[1]}.")


def match_indent(line):
    return line[: len(line) - len(line.lstrip())]


# --- pages ---------------------------------------------------------------------------------------
CLASS_LINE = re.compile(r"(?:class|struct|enum class) (\w+)[^;]*\{$|TORCH_MODULE\((\w+)\)")


@functools.cache
def class_names():
    """Classes and enumerations of the public headers: name -> name with its namespace."""
    names = {}
    for folder in HEADERS:
        for path in sorted((ROOT / folder).rglob("*.hpp")):
            namespace = "detail"
            for line in path.read_text(encoding="utf-8").splitlines() if "/detail/" not in str(path) else ():
                if match := re.match(r"namespace ([\w:]+) \{", line):
                    namespace = match[1]
                elif namespace.endswith("detail"):
                    continue
                elif match := CLASS_LINE.match(line):
                    names[match[1] or match[2]] = f"{namespace}::{match[1] or match[2]}"
    return names


class Page:
    def __init__(self, path, lines):
        self.path, self.lines = path, lines
        self.names = class_names()

    def convert(self):
        fence, title, slugs = False, True, {}
        for i, line in enumerate(self.lines):
            if line.lstrip().startswith("```"):
                fence = not fence
                if fence and line.strip() == "```":
                    self.lines[i] = line + "{.unparsed}"
            elif fence:
                continue
            elif heading := re.match(r"(#+) (.*)", line):
                label = page_label(self.path)
                if not title:
                    name = slug(heading[2])
                    count = slugs[name] = slugs.get(name, -1) + 1
                    label += "__" + name + (f"-{count}" if count else "")
                title = False
                self.lines[i] = f"{heading[1]} {self.text(heading[2], links=False)} {{#{label}}}"
            else:
                self.lines[i] = self.text(line)
        return self.lines

    def text(self, line, links=True):
        """Converts links, code and other text of a line."""
        parts = re.split(r"(`[^`]+`|\[[^\]]*\]\([^)]+\)|https?://[^\s)]+)", line)
        for i, part in enumerate(parts):
            if part.startswith("`") and part.endswith("`") and len(part) > 2:
                # Tables also have PyTorch's names.
                known = links and ("::" in part or not line.startswith("|"))
                parts[i] = self.code(part[1:-1]) if known else part
            elif link := re.match(r"\[(.*)\]\((.+)\)$", part):
                parts[i] = self.link(link[1], link[2]) if links else link[1]
            elif not part.startswith("http"):
                part = re.sub(r"([@\\%])", r"\\\1", part)
                parts[i] = re.sub(r"<(?=[\w/!.])", "&lt;", part)
        return "".join(parts)

    def code(self, code):
        name = self.names.get(code.removeprefix("ddp::").removeprefix("models::").removeprefix("ops::"))
        return f'<code>@ref {name} "{code}"</code>' if name else f"`{code}`"

    def link(self, text, link):
        target = self.target(link)
        if (
            self.path.parent.name == "recipes"
            and self.path.name == "README.md"
            and re.fullmatch(r"\w+\.md", link)
        ):
            return (
                f'@subpage {target.removeprefix("@ref ")} "{text}"'  # below this page in the tree on the left
            )
        return f"[{text}]({target})"

    def target(self, link):
        """The target of a link as Doxygen takes it."""
        if re.match(r"https?:|mailto:", link):
            return link
        name, _, anchor = link.partition("#")
        path = self.path
        if name:
            path = pathlib.Path(*normal_parts(self.path.parent / name))
        if path.suffix == ".md" and path.parts[0] != "libddp":  # maps of source folders are no pages
            return f"@ref {page_label(path)}" + (f"__{anchor}" if anchor else "")
        for folder in HEADERS:
            if path.is_relative_to(folder) and "detail" not in path.parts:
                return f"@ref {path.relative_to(folder)}"
        return f"files/{path}.txt" if path.suffix not in (".png", ".svg", ".jpg", ".pdf") else f"files/{path}"


def normal_parts(path):
    parts = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return parts


def main():
    folder = pathlib.Path(sys.argv[1])
    for path in map(pathlib.Path, sys.argv[2:]):
        lines = path.read_text(encoding="utf-8").splitlines()
        kind = {".md": Page, ".hpp": Header}.get(path.suffix)
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(
            "\n".join(kind(path, lines).convert() if kind else lines) + "\n", encoding="utf-8"
        )


main()
