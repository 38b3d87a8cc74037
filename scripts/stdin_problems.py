"""Problems that read stdin: inputs, a reference, a right program, and one with a fault of its own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable


def _numbers(text: str) -> list[int]:
    return list(map(int, text.split()))


def _rows(text: str) -> list[list[int]]:
    return [_numbers(line) for line in text.splitlines()[1:]]


def _primes(n: int) -> list[int]:
    return [p for p in range(2, n + 1) if all(p % q for q in range(2, p))]


def _collatz(n: int) -> int:
    return 0 if n == 1 else 1 + _collatz(n // 2 if n % 2 == 0 else 3 * n + 1)


# name, inputs, reference, right program, wrong program
STDIN: list[tuple[str, list[str], Callable[[str], str], str, str]] = [
    (
        "sum",
        ["1 2\n", "-5 9\n", "0 0\n"],
        lambda t: f"{sum(_numbers(t))}\n",
        "a, b = map(int, input().split())\nprint(a + b)",
        "a, b = map(int, input().split())\nprint(abs(a) + b)",
    ),
    (
        "reverse",
        ["abc\n", "level up\n", "x\n"],
        lambda t: t.strip()[::-1] + "\n",
        "print(input()[::-1])",
        "print(''.join(reversed(sorted(input()))))",
    ),
    (
        "largest",
        ["3\n1 9 4\n", "2\n-3 -8\n", "1\n7\n"],
        lambda t: f"{max(_numbers(t)[1:])}\n",
        "input()\nprint(max(map(int, input().split())))",
        "n = int(input())\nbest = 0\nfor x in map(int, input().split()): best = max(best, x)\nprint(best)",
    ),
    (
        "even or odd",
        ["4\n", "7\n", "-2\n"],
        lambda t: "even\n" if int(t) % 2 == 0 else "odd\n",
        "print('even' if int(input()) % 2 == 0 else 'odd')",
        "print('even' if int(input()) % 4 == 0 else 'odd')",
    ),
    (
        "factorial",
        ["5\n", "0\n", "20\n"],
        lambda t: f"{math.factorial(int(t))}\n",
        "import math\nprint(math.factorial(int(input())))",
        "n = int(input())\nr = n\nfor i in range(1, n): r *= i\nprint(r)",
    ),
    (
        "fizz",
        ["5\n", "15\n", "1\n"],
        lambda t: "".join(f"{'Fizz' * (i % 3 == 0) + 'Buzz' * (i % 5 == 0) or i}\n" for i in range(1, int(t) + 1)),
        "for i in range(1, int(input()) + 1):\n    s = ('Fizz' if i % 3 == 0 else '') + ('Buzz' if i % 5 == 0 else '')\n    print(s or i)",
        "for i in range(1, int(input()) + 1):\n    print('Fizz' if i % 3 == 0 else 'Buzz' if i % 5 == 0 else i)",
    ),
    (
        "mean",
        ["1 2 3\n", "2 5\n", "10\n"],
        lambda t: f"{sum(_numbers(t)) / len(_numbers(t)):.6f}\n",
        "x = list(map(int, input().split()))\nprint(sum(x) / len(x))",
        "x = list(map(int, input().split()))\nprint(sum(x) // len(x))",
    ),
    (
        "words",
        ["the cat the dog\n", "a\n", "b a b\n"],
        lambda t: "".join(f"{w} {n}\n" for w, n in sorted(Counter(t.split()).items())),
        "from collections import Counter\nfor w, n in sorted(Counter(input().split()).items()): print(w, n)",
        "from collections import Counter\nfor w, n in Counter(input().split()).items(): print(w, n + (w == 'a'))",
    ),
    (
        "lines",
        ["3\nx y\nz\nw\n", "1\nq\n", "2\n1\n2\n"],
        lambda t: "\n".join(reversed(t.splitlines()[1:])) + "\n",
        "import sys\nlines = sys.stdin.read().splitlines()[1:]\nprint('\\n'.join(lines[::-1]))",
        "import sys\nlines = sys.stdin.read().splitlines()[1:]\nprint(' '.join(lines[::-1]))",
    ),
    (
        "triangle",
        ["3\n", "1\n", "4\n"],
        lambda t: "".join(" " * (int(t) - i) + "*" * (2 * i - 1) + "\n" for i in range(1, int(t) + 1)),
        "n = int(input())\nfor i in range(n): print(' ' * (n - i - 1) + '*' * (2 * i + 1))",
        "n = int(input())\nfor i in range(n): print('*' * (2 * i + 1))",
    ),
    (
        "primes",
        ["10\n", "2\n", "30\n"],
        lambda t: " ".join(map(str, _primes(int(t)))) + "\n",
        "n = int(input())\nprint(*[p for p in range(2, n + 1) if all(p % q for q in range(2, int(p ** 0.5) + 1))])",
        "n = int(input())\nprint(*[p for p in range(2, n + 1) if all(p % q for q in range(2, int(p ** 0.5)))])",
    ),
    (
        "gcd",
        ["12 18\n", "7 3\n", "0 5\n"],
        lambda t: f"{math.gcd(*_numbers(t))}\n",
        "a, b = map(int, input().split())\nwhile b: a, b = b, a % b\nprint(a)",
        "a, b = map(int, input().split())\nprint(max(d for d in range(1, min(a, b) + 2) if a % d == 0 and b % d == 0) % 6)",
    ),
    (
        "cases",
        ["2\n1 2\n3 4\n", "1\n5 5\n", "3\n0 1\n2 2\n9 9\n"],
        lambda t: "".join(f"Case #{i}: {sum(r)}\n" for i, r in enumerate(_rows(t), 1)),
        "for i in range(int(input())):\n    print(f'Case #{i + 1}: {sum(map(int, input().split()))}')",
        "for i in range(int(input())):\n    print(f'Case #{i}: {sum(map(int, input().split()))}')",
    ),
    (
        "yes or no",
        ["racecar\n", "ab\n", "abba\n"],
        lambda t: "YES\n" if t.strip() == t.strip()[::-1] else "NO\n",
        "s = input()\nprint('YES' if s == s[::-1] else 'NO')",
        "s = input()\nprint('Yes' if s == s[::-1] else 'No')",
    ),
    (
        "binary",
        ["5\n", "0\n", "10\n"],
        lambda t: f"{int(t):08b}\n",
        "print(format(int(input()), '08b'))",
        "print(format(int(input()), 'b'))",
    ),
    (
        "matrix",
        ["2\n1 2\n3 4\n", "1\n7\n", "3\n1 2 3\n4 5 6\n7 8 9\n"],
        lambda t: "".join(" ".join(map(str, c)) + "\n" for c in zip(*_rows(t))),
        "n = int(input())\nm = [input().split() for _ in range(n)]\nfor c in zip(*m): print(*c)",
        "n = int(input())\nm = [input().split() for _ in range(n)]\nfor c in m: print(*c)",
    ),
    (
        "sorted",
        ["3 1 2\n", "5\n", "2 -1 10\n"],
        lambda t: " ".join(map(str, sorted(_numbers(t)))) + "\n",
        "print(*sorted(map(int, input().split())))",
        "print(*sorted(input().split()))",
    ),
    (
        "root",
        ["2\n", "9\n", "0\n"],
        lambda t: f"{math.sqrt(int(t)):.9f}\n",
        "print(int(input()) ** 0.5)",
        "n = int(input())\nprint(round(n ** 0.5, 3))",
    ),
    (
        "vowels",
        ["hello world\n", "xyz\n", "AEIOU\n"],
        lambda t: f"{sum(t.lower().count(v) for v in 'aeiou')}\n",
        "print(sum(c in 'aeiouAEIOU' for c in input()))",
        "print(sum(c in 'aeiou' for c in input()))",
    ),
    (
        "big",
        ["99999999999999999999 1\n", "12345678901234567890 10\n", "2 3\n"],
        lambda t: f"{math.prod(_numbers(t))}\n",
        "a, b = map(int, input().split())\nprint(a * b)",
        "a, b = map(float, input().split())\nprint(int(a * b))",
    ),
    (
        "nothing read",
        ["\n", "ignored\n"],
        lambda t: "Hello, World!\n",
        "print('Hello, World!')",
        "print('Hello World')",
    ),
    (
        "to the end",
        ["1\n2\n3\n", "10\n", "4\n4\n"],
        lambda t: f"{sum(_numbers(t))}\n",
        "import sys\nprint(sum(int(line) for line in sys.stdin))",
        "import sys\nprint(sum({int(line) for line in sys.stdin}))",
    ),
    (
        "caesar",
        ["abc 1\n", "xyz 3\n", "q 0\n"],
        lambda t: "".join(chr((ord(c) - 97 + int(t.split()[1])) % 26 + 97) for c in t.split()[0]) + "\n",
        "s, k = input().split()\na = 'abcdefghijklmnopqrstuvwxyz'\nprint(''.join(a[(a.index(c) + int(k)) % 26] for c in s))",
        "s, k = input().split()\nprint(''.join(chr(ord(c) + int(k)) for c in s))",
    ),
    (
        "collatz",
        ["6\n", "1\n", "7\n"],
        lambda t: f"{_collatz(int(t))}\n",
        "n = int(input())\nsteps = 0\nwhile n != 1:\n    n = n // 2 if n % 2 == 0 else 3 * n + 1\n    steps += 1\nprint(steps)",
        "n = int(input())\nsteps = 1\nwhile n != 1:\n    n = n // 2 if n % 2 == 0 else 3 * n + 1\n    steps += 1\nprint(steps)",
    ),
    (
        "buffer",
        ["4 4\n", "1 10\n", "3 0\n"],
        lambda t: f"{math.prod(_numbers(t))}\n",
        "import sys\na, b = map(int, sys.stdin.buffer.read().split())\nsys.stdout.buffer.write(b'%d\\n' % (a * b))",
        "import sys\na, b = map(int, sys.stdin.buffer.read().split())\nsys.stdout.buffer.write(b'%d\\n' % (a + b))",
    ),
    (
        "main",
        ["3\n", "8\n", "-1\n"],
        lambda t: f"{int(t) ** 2}\n",
        "def main():\n    print(int(input()) ** 2)\n\nif __name__ == '__main__':\n    main()",
        "def main():\n    print(int(input()) ** 2)\n\nif __name__ == '__test__':\n    main()",
    ),
    (
        "descriptor",
        ["5 6\n", "1 1\n", "9 -9\n"],
        lambda t: f"{sum(_numbers(t))}\n",
        "import os\na, b = map(int, os.read(0, 1000).split())\nos.write(1, str(a + b).encode())",
        "import os\na, b = map(int, os.read(0, 1000).split())\nos.write(2, str(a + b).encode())",
    ),
    (
        "opened",
        ["5\n6\n", "1\n", "0\n0\n0\n"],
        lambda t: f"{len(_numbers(t))}\n",
        "print(len(open(0).read().split()))",
        "print(len(open(0).readline().split()) * 2)",
    ),
    (
        "leaves",
        ["2\n", "3\n", "5\n"],
        lambda t: f"{2 ** int(t)}\n",
        "import sys\nprint(1 << int(input()))\nsys.exit(0)",
        "import sys\nprint(int(input()) * 2)\nsys.exit(0)",
    ),
    (
        "grid",
        ["2 3\n", "1 1\n", "3 2\n"],
        lambda t: "".join("." * _numbers(t)[1] + "\n" for _ in range(_numbers(t)[0])),
        "h, w = map(int, input().split())\nfor _ in range(h): print('.' * w)",
        "h, w = map(int, input().split())\nfor _ in range(w): print('.' * h)",
    ),
]
