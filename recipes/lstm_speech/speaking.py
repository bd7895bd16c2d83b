"""Speak sentences with espeak-ng: a program of its own, so that each corpus starts from the library's initial state.

``python speaking.py JOB OUT``: JOB is a JSON file of ``{"rate": samples per second, "sentences": [{"voice", "text",
"speed", "pitch"}, ...]}``; OUT becomes an .npz of ``samples`` (int16, one sentence after another) and ``ends``. A
line of progress goes to stderr. Exit status 3: the library cannot be used, and why is the last line of stdout.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Speaker", "speak"]

SYNCHRONOUS, DONT_EXIT, UTF8 = 2, 0x8000, 1
"""Of espeak-ng's speak_lib.h: sound goes to a callback during the call; an error is no exit; text is UTF-8."""
RATE, PITCH = 1, 3
"""Its numbers of parameters."""
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class Speaker:
    """The library, which has one state per process.

    Raises:
        OSError: it cannot be loaded or does not start.
        ImportError: the package espeakng-loader, which holds it, is not installed.
    """

    def __init__(self) -> None:
        import espeakng_loader

        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        self._library.espeak_Synth.argtypes = [
            *(ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int, ctypes.c_uint, ctypes.c_uint),
            *(ctypes.c_void_p, ctypes.c_void_p),
        ]
        self._library.espeak_ng_SetRandSeed.argtypes = [ctypes.c_long]
        path = espeakng_loader.get_data_path()
        self.rate: int = self._library.espeak_Initialize(SYNCHRONOUS, 0, str(path).encode(), DONT_EXIT)
        if self.rate <= 0:
            raise OSError(f"espeak_Initialize returned {self.rate} for the data in {path}")
        self._parts: list[npt.NDArray[np.int16]] = []
        self._callback = CALLBACK(self._receive)  # must live as long as the library calls it
        self._library.espeak_SetSynthCallback(self._callback)

    def _receive(self, samples: Any, count: int, events: Any) -> int:
        if samples and count > 0:
            self._parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, voice: str, text: str, speed: int, pitch: int) -> npt.NDArray[np.int16]:
        """The sound of a text.

        Args:
            voice: a language and a variant, such as ``en-us+f2``.
            text: what to say.
            speed: words per minute, 80 to 450.
            pitch: 0 to 99.

        Returns:
            int16 [samples], ``rate`` of them per second.

        Raises:
            OSError: there is no such voice, or nothing was said.
        """
        self._library.espeak_ng_SetRandSeed(1)  # of breath and whisper; else it is the time of day
        if self._library.espeak_SetVoiceByName(voice.encode()):
            raise OSError(f"espeak-ng has no voice {voice!r}")
        self._library.espeak_SetParameter(RATE, speed, 0)
        self._library.espeak_SetParameter(PITCH, pitch, 0)
        self._parts.clear()
        raw = text.encode()
        failed = self._library.espeak_Synth(raw, len(raw) + 1, 0, 1, 0, UTF8, None, None)
        if failed or not self._parts:
            raise OSError(f"espeak_Synth returned {failed} and {len(self._parts)} pieces of sound for {text!r}")
        return np.concatenate(self._parts)


def speak(job: dict[str, Any]) -> Iterator[npt.NDArray[np.int16]]:
    """The sound of each sentence, at the job's sample rate.

    Raises:
        OSError, ImportError: as :class:`Speaker`.
    """
    from scipy.signal import resample_poly

    speaker = Speaker()
    ratio = Fraction(job["rate"], speaker.rate)
    for sentence in job["sentences"]:
        sound = resample_poly(speaker.say(**sentence).astype(np.float32), ratio.numerator, ratio.denominator)
        yield np.clip(np.rint(sound), -32768, 32767).astype(np.int16)


def main() -> None:
    """Do the job of the command line."""
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    total, sounds = len(job["sentences"]), []
    try:
        for number, sound in enumerate(speak(job), 1):
            sounds.append(sound)
            if number % 100 == 0 or number == total:
                print(f"\rspeaking digits: {number} of {total}", end="", file=sys.stderr, flush=True)
    except (OSError, ImportError) as error:
        print(error)
        sys.exit(3)
    finally:
        print(file=sys.stderr)
    with open(sys.argv[2], "wb") as out:
        np.savez(out, samples=np.concatenate(sounds), ends=np.cumsum([len(sound) for sound in sounds]))


if __name__ == "__main__":
    main()
