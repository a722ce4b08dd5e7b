"""The kind of a media file, told by its ending: those Hugging Face `datasets` looks for in folders, and a few more.

A file with an ending of no kind is never guessed at; whoever knows what it is says so.
"""

from __future__ import annotations

# Beyond the lists of `datasets` 5.2.0: .m4a, .aac, .amr, .aif and .oga for audio; and video has the endings that its
# audio folders take along because they can hold sound.
_LISTS = {
    "image": """.blp .bmp .dib .bufr .cur .pcx .dcx .dds .ps .eps .fit .fits .fli .flc .ftc .ftu .gbr .gif .grib .png
        .apng .jp2 .j2k .jpc .jpf .jpx .j2c .icns .ico .im .iim .tif .tiff .jfif .jpe .jpg .jpeg .mpg .mpeg .msp .pcd
        .pxr .pbm .pgm .ppm .pnm .psd .bw .rgb .rgba .sgi .ras .tga .icb .vda .vst .webp .wmf .emf .xbm .xpm""",
    "audio": """.aiff .aif .au .avr .caf .flac .htk .svx .mat4 .mat5 .mpc2k .ogg .oga .paf .pvf .raw .rf64 .sd2 .sds
        .ircam .voc .w64 .wav .nist .wavex .wve .xi .mp3 .opus .m4a .aac .amr .3gp .3g2 .avi .asf .flv .mp4 .mov .m4v
        .mkv .mpg .webm .f4v .wmv .wma .ogm .mxf .nut""",
    "video": ".mkv .mp4 .avi .mpeg .mov .mpg .webm .m4v .flv .f4v .wmv .asf .ogm .mxf .nut .3gp .3g2",
    "mesh": ".glb .gltf .ply .stl",
    "pdf": ".pdf",
    "nifti": ".nii .nii.gz",
}
ENDINGS = {kind: frozenset(words.split()) for kind, words in _LISTS.items()}
# An ending of two kinds means the later: .mp4 is a video unless someone says audio.
_KINDS = {ending: kind for kind, endings in ENDINGS.items() for ending in endings}


def ending_of(name: str) -> str:
    """The ending of a file name in lower case; `.nii.gz` is one.

    >>> ending_of("sub-01/T1w.NII.gz"), ending_of("a/b.c/README")
    ('.nii.gz', '')
    """
    lower = name[name.rfind("/") + 1 :].lower()
    if lower.endswith(".nii.gz"):
        return ".nii.gz"
    at = lower.rfind(".")
    return lower[at:] if at > 0 else ""


def kind_of(name: str) -> str | None:
    """What a file's ending says it is.

    >>> kind_of("a/cat.JPG"), kind_of("bold.nii.gz"), kind_of("notes.txt")
    ('image', 'nifti', None)
    """
    return _KINDS.get(ending_of(name))
